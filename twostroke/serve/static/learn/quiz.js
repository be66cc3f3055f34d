// A quiz and five myths. Every answer has an explanation, and a run on the engine shows it.
import {el} from "../shared/dom.js";
import {byStreams} from "./company.js";
import {bytes, figure, percent, plural, time} from "./draw.js";
import {question} from "./question.js";
import {gaps, longestGap, onlyDecodes, onlyPrefills, sum, ttft, tpot} from "./records.js";
import {freshFacts, getFacts, measured, once, thisMachine} from "./source.js";
import {runButton} from "./widgets.js";

const request = async (prompt, answer) => (await measured(prompt, answer)).requests[0];

const QUIZ = [
  {
    name: "slow-start", text: "“It feels slow to start but streams quickly.” Which phase?", right: 0,
    options: [
      {text: "Prefill (or the queue before it)", why: "Slow to start is a long time to the first token: queue and prefill."},
      {text: "Decode", why: "Decode decides how quickly text streams, and that is said to be quick."},
      {text: "Both alike", why: "The two are felt at different times: one before the first token, one between tokens."},
    ],
    measure: async () => {
      const one = await request(1024, 16);
      return {agrees: ttft(one) > 5 * tpot(one), result: `A prompt of ${plural(one.num_prompt, "token")}: ${time(ttft(one))} until the first token, then ${time(tpot(one))} for each.`};
    },
  },
  {
    name: "memory-bound", text: "Compute at 18 %, memory bandwidth at 95 %. What helps?", right: 2,
    options: [
      {text: "A processor with more FLOPs", why: "82 % of the FLOPs are idle already. More of them would be idle, too."},
      {text: "More memory", why: "Room is not the limit, the speed of reading is. More memory helps only if it lets more streams share a step."},
      {text: "Smaller weights, or more streams in a step", why: "Fewer bytes for each token: smaller ones, or the same ones for more tokens."},
    ],
    measure: async () => {
      const rows = byStreams((await once("batch")).arms[0]), [one, most] = [rows[0], rows.at(-1)];
      return {agrees: most.rate > one.rate, result: `${plural(one.streams, "stream")}: ${figure(one.rate)} tokens a second. ${most.streams} streams: ${figure(most.rate)}.`};
    },
  },
  {
    name: "chunking", text: "Why does chunking help those who already decode?", right: 1,
    options: [
      {text: "Chunks make prefill cheaper", why: "They cost the same, or a little more: the weights are read once for each chunk."},
      {text: "A token of theirs comes with every chunk", why: "Decode slots are in each step. Shorter steps are shorter waits."},
      {text: "The long prompt waits until they are done", why: "It does not: it is read chunk by chunk while they write."},
    ],
    measure: async () => {
      const {arms} = await once("stall"), worst = (arm) => time(longestGap(arm.requests[0]).seconds);
      return {agrees: true, result: `The longest gap of the stream: ${arms.map((arm) => `${arm.name} ${worst(arm)}`).join(", ")}.`};
    },
  },
  {
    name: "system-prompt", text: "All your requests begin with the same 2,000 tokens. What do you gain from a prefix cache?", right: 0,
    options: [
      {text: "A shorter time to the first token", why: "The shared blocks come from the cache, and only the rest is prefilled."},
      {text: "Faster streaming", why: "Decode reads the same number of keys and values, wherever they came from."},
      {text: "Nothing, since the answers differ", why: "Blocks are found by the prompt's beginning. The answers do not matter."},
    ],
    measure: async () => {
      const [first, second] = (await once("prefix")).arms[0].requests;
      return {agrees: ttft(second) < ttft(first), result: `First token after ${time(ttft(first))}, and the second time after ${time(ttft(second))}.`};
    },
  },
  {
    name: "long-answers", text: "Users complain that long answers take for ever. Prompts are short. What would you look at first?", right: 1,
    options: [
      {text: "TTFT", why: "It is paid once. A long answer pays TPOT for every token."},
      {text: "TPOT", why: "A long answer is many decode steps: its time is the number of tokens times TPOT."},
      {text: "The length of the queue", why: "Waiting shows before the first token, and these requests start at once."},
    ],
    measure: async () => {
      const one = await request(32, 96), total = one.token_s.at(-1) - one.received_s;
      return {agrees: total > 3 * ttft(one), result: `${plural(one.num_prompt, "token")} in, ${one.token_s.length} out: ${percent((total - ttft(one)) / total)} of the time was decode.`};
    },
  },
  {
    name: "long-context", text: "Each stream has 100,000 tokens behind it. Why does a larger batch help less now?", right: 2,
    options: [
      {text: "The weights grow with the context", why: "They stay the same size. It is the cache that grows."},
      {text: "Prefill is never finished", why: "It is, before decode begins. Now the bytes that each step reads count."},
      {text: "Each stream brings its own cache to read", why: "Weights are shared by the batch, caches are not. When caches are most of the bytes, a batch shares little."},
    ],
    measure: async () => {
      const steps = onlyDecodes((await once("context")).arms[0]), [least, most] = [steps[0], steps.at(-1)];
      return {agrees: most.decode.num_bytes > least.decode.num_bytes, result: `A step behind a short text moved ${bytes(least.decode.num_bytes)}, behind a long one ${bytes(most.decode.num_bytes)}: the difference is one stream's cache.`};
    },
  },
];

const MYTHS = [
  {
    name: "full-memory", myth: "“The GPU's memory is full, so the cache is full.”",
    measure: async () => {
      const facts = await freshFacts(), {kv} = facts;
      return `False. The engine reserves ${bytes(facts.kv_bytes)} for ${kv.reserved.toLocaleString("en")} tokens at its start, whether they are used or not. Now ${kv.used.toLocaleString("en")} are in use, ${kv.cached.toLocaleString("en")} are kept for prefixes and ${kv.free.toLocaleString("en")} are free.`;
    },
  },
  {
    name: "more-flops", myth: "“More FLOPs make streaming faster.”",
    measure: async () => {
      const arm = await measured(512, 24);
      const rate = (steps, phase) => sum(steps.map((one) => one[phase].flops)) / sum(steps.map((one) => one.device_s));
      const decode = rate(onlyDecodes(arm), "decode"), prefill = rate(onlyPrefills(arm), "prefill");
      return `Not for one stream. In the same request prefill multiplied ${figure(prefill / decode)} times as fast as decode, on the same machine: decode had FLOPs to spare and waited for memory.`;
    },
  },
  {
    name: "batch", myth: "“Decode does not scale with batch.”",
    measure: async () => {
      const rows = byStreams((await once("batch")).arms[0]), [one, most] = [rows[0], rows.at(-1)];
      return `It does. ${most.streams} streams wrote ${figure(most.rate / one.rate)} times as many tokens a second as one, because they share each reading of the weights.`;
    },
  },
  {
    name: "own-ttft", myth: "“Chunking shortens the time to one's own first token.”",
    measure: async () => {
      const {arms} = await once("stall");
      if (arms.length < 2) return `It shortens the waits of others. To see it, start the server with “twostroke learn”; here the prompt's first token took ${time(ttft(arms[0].requests[1]))}.`;
      return `It does not: the prompt's own first token took ${time(ttft(arms[0].requests[1]))} in one piece and ${time(ttft(arms[1].requests[1]))} in chunks. The other stream gained: its longest gap went from ${time(longestGap(arms[0].requests[0]).seconds)} to ${time(longestGap(arms[1].requests[0]).seconds)}.`;
    },
  },
  {
    name: "utilisation", myth: "“GPU utilisation of 100 % means that the GPU is busy.”",
    measure: async () => {
      const arm = await measured(64, 48);
      const steps = onlyDecodes(arm).slice(1), busy = sum(steps.map((one) => one.device_s)), whole = sum(gaps(arm.requests[0]).slice(1).map((one) => one.seconds));
      const machine = thisMachine(), rate = sum(steps.map((one) => one.decode.flops)) / busy;
      const share = machine ? ` and used ${percent(rate / machine.flops_per_s)} of the products that it can do` : "";
      return `Utilisation counts the time in which something runs. While one stream decoded, the device ran ${percent(Math.min(1, busy / whole))} of the time${share}: always at work, mostly waiting for memory.`;
    },
  },
];

export async function quiz() {
  await getFacts();
  return el("div", {class: "stack", "data-view": "quiz"}, QUIZ.map(question));
}

export async function myths() {
  await getFacts();
  return el("div", {class: "stack", "data-view": "myths"}, MYTHS.map(myth));
}

function myth({name, myth: text, measure}) {
  const result = el("p", {class: "sentence", "aria-live": "polite", hidden: true});
  return el("section", {class: "stack myth", "data-myth": name, "aria-label": text}, el("h3", {}, text),
    runButton("Test it with a run", async () => {
      result.textContent = await measure();
      result.hidden = false;
    }, {primary: false, name: "settle"}), result);
}
