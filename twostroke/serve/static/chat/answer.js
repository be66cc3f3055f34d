// One answer of the model: requests it, reads its stream of events, and stores it in a message.
import {streamEvents} from "../shared/api.js";

const ALTERNATIVES = 5;

export const emptyAnswer = () => ({
  finish: null, // stop, length, tool_calls; stopped (by the user), error; null: being written
  error: "", usage: null, timings: null, progress: null,
  ttftMs: 0, totalMs: 0, chunks: 0, // measured and counted by this page
  tokens: [], // [text, log-probability, [[text, log-probability], …], ms since the request]
});

// Returns the body of the request for an answer to `messages`. `settings`: see settings.js.
export function requestBody(model, messages, settings) {
  const body = {model, messages, stream_options: {include_usage: true}, return_progress: true};
  if (settings.details !== false) {
    Object.assign(body, {logprobs: true, top_logprobs: ALTERNATIVES, return_token_gaps: true});
  }
  for (const [name, value] of Object.entries(settings.sampling ?? {})) {
    if (value !== null && value !== "") body[name] = value;
  }
  if (settings.tools?.trim()) body.tools = JSON.parse(settings.tools);
  if (settings.more?.trim()) Object.assign(body, JSON.parse(settings.more));
  return body;
}

// Writes the answer into `node`, a message of the conversation, and calls `onChange` as it grows.
export async function writeAnswer(node, body, {signal, onChange}) {
  const began = performance.now();
  const {answer} = node;
  const decoder = new TextDecoder();
  try {
    for await (const {event, receivedAt} of streamEvents("v1/chat/completions", body, {signal})) {
      take(node, event, receivedAt - began, decoder);
      onChange();
    }
    if (answer.finish === null) fail(answer, "The answer ended without a reason.");
  } catch (error) {
    if (error.name === "AbortError") answer.finish = "stopped";
    else fail(answer, error.message);
  }
  answer.totalMs = performance.now() - began;
  answer.progress = null;
  onChange();
}

function fail(answer, message) {
  answer.finish = "error";
  answer.error = message;
}

function take(node, event, atMs, decoder) {
  const {answer} = node;
  if (event.prompt_progress) answer.progress = event.prompt_progress;
  if (event.usage) answer.usage = event.usage;
  const choice = event.choices?.[0];
  if (!choice) return;
  if (event.timings) answer.timings = event.timings;
  const {content, reasoning, tool_calls: calls} = choice.delta ?? {};
  if (content || reasoning || calls) {
    answer.progress = null;
    answer.ttftMs ||= atMs;
    answer.chunks += 1;
  }
  if (content) node.content += content;
  if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) addCall(node, call);
  for (const token of choice.logprobs?.content ?? []) {
    const others = token.top_logprobs.map((one) => [textOf(one), one.logprob]);
    answer.tokens.push([decoder.decode(new Uint8Array(token.bytes ?? []), {stream: true}), token.logprob, others, atMs]);
  }
  if (choice.finish_reason) answer.finish = choice.finish_reason;
}

// Returns the text of a token. If it is a part of a character, returns its bytes as text.
function textOf(token) {
  return token.token.includes("\ufffd") && token.bytes
    ? token.bytes.map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("") : token.token;
}

function addCall(node, {index, id, function: given}) {
  node.toolCalls ??= [];
  const call = node.toolCalls[index] ??= {id: "", name: "", arguments: ""};
  if (id) call.id = id;
  if (given?.name) call.name = given.name;
  call.arguments += given?.arguments ?? "";
}
