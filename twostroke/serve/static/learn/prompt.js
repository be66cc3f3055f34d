// "Your own prompt": runs a text and shows each step: chunks of prefill, tokens of decode, KV blocks.
import {el} from "../shared/dom.js";
import {attentionPanel} from "./attention.js";
import {candidatePanel} from "./candidates.js";
import {count, picture, plural, svg, time, visible} from "./draw.js";
import {byNumber, life} from "./records.js";
import {getFacts, isRecorded, knownFacts, lastRun, run} from "./source.js";
import {keep, textParam} from "./state.js";
import {fact, legend, newId, runButton} from "./widgets.js";

const SPEEDS = [["slow motion × 0.1", 0.1], ["× 0.5", 0.5], ["real time", 1], ["× 4", 4]];

export async function prompt() {
  await getFacts();
  const id = newId("text");
  const {limits, example_text: example, max_num_batched_tokens: budget} = knownFacts();
  const text = el("textarea", {id, rows: 3, maxlength: 12000, readonly: isRecorded});
  text.value = textParam("text", lastRun("text")?.tokens.map((one) => one.text).join("") ?? example);
  const stage = el("div", {class: "stack"});
  const show = () => stage.replaceChildren(player(lastRun("text")));
  const again = async () => {
    keep({text: text.value});
    await run("text", {text: text.value, max_tokens: 24});
    show();
  };
  const lengthen = () => { text.value = `${text.value} ${text.value}`; };
  if (lastRun("text")) show();
  return el("div", {class: "stack", "data-view": "prompt"},
    el("label", {for: id}, isRecorded ? "The recorded prompt" : `Your prompt (up to ${count(limits.text_tokens)} tokens; the model goes on with your text)`), text,
    isRecorded ? "" : el("p", {class: "note"}, el("button", {type: "button", "data-part": "lengthen", onclick: lengthen}, "Twice as long"), ` A prompt of more than ${count(budget)} tokens is read in chunks.`),
    runButton("Run it on the engine", again),
    stage);
}

// A player for the steps of a run. Position n is after n steps.
function player(found) {
  const one = found.arms[0], request = one.requests[0];
  const steps = life(request, byNumber(one));
  let at = 0, timer = null;
  const slide = el("input", {type: "range", min: 0, max: steps.length, value: 0, step: 1, "aria-label": "Step", oninput: () => { stop(); draw(Number(slide.value)); }});
  const play = el("button", {type: "button", class: "primary", onclick: () => timer ? stop() : start()}, "Play");
  const speedId = newId("speed");
  const speed = el("select", {id: speedId}, SPEEDS.map(([name, value]) => el("option", {value, selected: value === 0.1}, name)));
  const body = el("div", {class: "stack"});
  const candidates = candidatePanel(found);

  function start() {
    if (at >= steps.length) draw(0);
    play.textContent = "Pause";
    tick();
  }
  function stop() {
    clearTimeout(timer);
    timer = null;
    play.textContent = "Play";
  }
  function tick() {
    if (at >= steps.length || !body.isConnected && at) return stop();
    const wait = 1000 * steps[at].seconds / Number(speed.value);
    timer = setTimeout(() => { draw(at + 1); tick(); }, Math.min(Math.max(wait, 15), 4000));
  }
  function draw(now) {
    at = now;
    slide.value = at;
    slide.setAttribute("aria-valuetext", at ? sentence(steps, at) : "before the first step");
    body.replaceChildren(...scene(found, one, request, steps, at));
    candidates.show(written(request, steps, at) - 1);
  }
  draw(steps.length);
  return el("div", {class: "stack"},
    el("div", {class: "transport"}, play,
      el("button", {type: "button", "aria-label": "One step back", onclick: () => { stop(); draw(Math.max(0, at - 1)); }}, "◀"),
      el("button", {type: "button", "aria-label": "One step forward", onclick: () => { stop(); draw(Math.min(steps.length, at + 1)); }}, "▶"),
      slide, el("label", {for: speedId, class: "sr"}, "Speed"), speed),
    body, candidates.element, attentionPanel(found.tokens));
}

const written = (request, steps, at) => {
  const prefill = request.chunks.length;
  return at < prefill ? 0 : 1 + steps.slice(prefill, at).length;
};

function sentence(steps, at) {
  const {kind, tokens, seconds} = steps[at - 1];
  return kind === "prefill" ? `Step ${at}: prefill computes ${plural(tokens, "prompt token")} in ${time(seconds)}.`
    : `Step ${at}: decode writes one token in ${time(seconds)}.`;
}

function scene(found, one, request, steps, at) {
  const done = steps.slice(0, at);
  const computed = request.num_cached + done.filter((step) => step.kind === "prefill").reduce((sum, step) => sum + step.tokens, 0);
  const wrote = written(request, steps, at);
  const prefill = done.filter((step) => step.kind === "prefill"), decode = done.filter((step) => step.kind === "decode");
  const total = (list) => list.reduce((sum, step) => sum + step.seconds, 0);
  const chips = found.tokens.map((token, n) => chip(token.text, n < request.num_cached ? "cached" : n < computed ? "prefill" : "later"));
  const answer = request.output_tokens.slice(0, wrote).map((token) => chip(found.vocabulary[token], "decode"));
  return [
    el("p", {class: "now"}, at ? sentence(steps, at) : `${plural(request.num_prompt, "prompt token")} wait. ${request.num_cached ? `${request.num_cached} of them are in the cache already.` : ""}`),
    el("div", {class: "tokens", role: "group", "aria-label": "Tokens"}, chips, answer),
    timeline(steps, at),
    legend(["prefill", "prefill"], ["decode", "decode"], ["cached", "taken from the prefix cache"]),
    el("dl", {class: "facts"},
      fact("Prefill so far", time(total(prefill)), `${plural(prefill.length, "step")}, ${count(prefill.reduce((sum, step) => sum + step.tokens, 0))} tokens`, "prefill"),
      fact("Decode so far", time(total(decode)), `${plural(decode.length, "step")}, one token each`, "decode"),
      fact("Tokens taken from the cache", count(request.num_cached), request.num_cached ? "they cost no prefill" : "run the same prompt again")),
    blocks(request, one.block_size, computed + Math.max(0, wrote - 1)),
  ];
}

const chip = (text, kind) => el("span", {class: `chip ${kind}`}, visible(text));

function timeline(steps, at) {
  const width = 760, whole = steps.reduce((sum, step) => sum + step.seconds, 0) || 1;
  let x = 0;
  const boxes = steps.map((step, n) => {
    const size = width * step.seconds / whole;
    const box = svg("rect", {
      x: x + 0.5, y: 2, width: Math.max(0.8, size - 1), height: 30, class: `fill ${step.kind} ${n < at ? "" : "later"}`,
      "data-step": step.step, "data-seconds": step.seconds, "data-tokens": step.tokens,
    }, svg("title", {}, `${step.kind}, ${plural(step.tokens, "token")}, ${time(step.seconds)}`));
    x += size;
    return box;
  });
  const shown = steps.slice(0, at).reduce((sum, step) => sum + step.seconds, 0);
  return picture(`${plural(steps.length, "step")}; each box is as wide as the step took. ${time(shown)} of ${time(whole)} have passed.`, width, 34, ...boxes);
}

// The blocks of the request in the KV cache. Layers with a window need only the blocks in the window,
// so each kind of layers has its own row.
function blocks(request, size, filled) {
  const windows = knownFacts().kv_windows, kinds = windows.length ? windows : [null];
  const hasWindow = kinds.some((window) => window !== null);
  return el("div", {class: "stack"},
    el("h3", {}, "The KV cache of this request"),
    el("p", {class: "note"}, `A block holds the keys and values of ${size} tokens. Full blocks stay after the request: the next prompt that begins the same takes them. The newest token has no keys and values yet: the next step computes them.`,
      hasWindow ? " Layers with a window look back a limited number of tokens. A block that has left the window is given back." : "",
      request.kv_evicted_tokens ? ` ${count(request.kv_evicted_tokens)} tokens were evicted while it wrote.` : ""),
    kinds.map((window) => blocksOf(request, size, filled, window, hasWindow)));
}

function blocksOf(request, size, filled, window, named) {
  const number = Math.ceil((request.num_prompt + request.output_tokens.length) / size);
  const visible = window === null ? 0 : Math.floor(Math.max(0, filled - window + 1) / size);
  const cells = Array.from({length: number}, (_, n) => {
    const used = n < visible ? 0 : Math.max(0, Math.min(size, filled - n * size));
    const kind = n < visible ? "left" : (n + 1) * size <= request.num_cached ? "cached" : used ? "used" : "empty";
    return el("li", {class: `block ${kind}`, "data-used": used}, el("meter", {min: 0, max: size, value: used, "aria-label": `Block ${n + 1}`}), el("span", {}, kind === "left" ? "left" : `${used}/${size}`));
  });
  const name = window === null ? "Layers that see all tokens" : `Layers with a window of ${plural(window, "token")}`;
  return el("div", {class: "stack", "data-window": window ?? "all"},
    named ? el("p", {class: "note"}, name) : "",
    el("ol", {class: "blocks", "aria-label": named ? name : "Blocks"}, cells));
}
