// Experiments with several requests. Each runs on the engine, and its picture shows the records.
import {el} from "../shared/dom.js";
import {bytes, count, figure, percent, picture, plural, svg, time} from "./draw.js";
import {byNumber, gaps, longestGap, median, onlyDecodes, startOf, sum, tpot, ttft} from "./records.js";
import {getFacts, knownFacts, lastRun, run} from "./source.js";
import {legend, runButton, table, wide} from "./widgets.js";

const WIDTH = 760;
const BARS = {className: "figures bars"};

export const EXPERIMENTS = {
  stall: {
    title: "A visitor with a long prompt",
    intro: "You read an answer, token by token. Another user arrives with a long prompt. What happens to your stream?",
    draw: stall,
  },
  batch: {
    title: "Many streams in one step",
    intro: "1, 2, 4, 8 and 16 streams decode together. One step writes a token for each of them.",
    draw: batch,
  },
  context: {
    title: "The cache is read at every step",
    intro: "One stream writes after prompts that get longer. Each step reads the keys and values of all tokens before it.",
    draw: context,
  },
  prefix: {
    title: "The same beginning twice",
    intro: "Two requests with the same prompt, one after the other. The second one finds its blocks in the cache.",
    draw: prefix,
  },
  full_cache: {
    title: "More tokens than the cache holds",
    intro: "Four streams write until the cache has no free block. The engine preempts one: it gives its blocks back, and its keys and values are computed again later.",
    draw: fullCache,
  },
};

// One experiment: a button that runs it, and the result of the newest run.
export async function experiment(name) {
  await getFacts();
  const {title, intro, draw} = EXPERIMENTS[name];
  const result = el("div", {class: "stack", "data-result": name});
  const show = () => { if (lastRun(name)) result.replaceChildren(...draw(lastRun(name))); };
  show();
  return el("section", {class: "stack experiment", "data-experiment": name, "aria-label": title},
    el("h3", {}, title), el("p", {}, intro),
    runButton("Run it on the engine", async () => { await run(name); show(); }, {name}), result);
}

export async function company() {
  return el("div", {class: "stack", "data-view": "company"}, await Promise.all(Object.keys(EXPERIMENTS).map(experiment)));
}

const sentence = (text) => el("p", {class: "sentence", "aria-live": "polite"}, text);

// A row of boxes on one time axis: {from, to, kind, title, data}.
function lane(y, height, boxes, scale) {
  return boxes.map(({from, to, kind, title, data}) => svg("rect", {
    x: scale(from), y, width: Math.max(1, scale(to) - scale(from) - 0.6), height, class: `fill ${kind}`, ...data,
  }, title && svg("title", {}, title)));
}

function axis(y, until, scale) {
  const step = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20].find((one) => until / one <= 8) ?? 60;
  const ticks = Array.from({length: Math.floor(until / step) + 1}, (_, n) => n * step);
  return ticks.map((at) => [
    svg("line", {x1: scale(at), x2: scale(at), y1: 0, y2: y, class: "grid"}),
    svg("text", {x: scale(at), y: y + 14, class: "tick middle"}, at ? time(at) : "0")]).flat();
}

// ── the stall ────────────────────────────────────────────────────────────────────────────────────

function stall(found) {
  const until = Math.max(...found.arms.map((arm) => Math.max(...arm.requests.map((one) => one.token_s.at(-1))) - startOf(arm)));
  const label = 104, scale = (at) => label + (WIDTH - label - 24) * at / until;
  const worst = found.arms.map((arm) => longestGap(arm.requests[0]).seconds);
  const first = found.arms.map((arm) => ttft(arm.requests[1]));
  const usual = found.arms.map((arm) => median(gaps(arm.requests[0]).map((one) => one.seconds)));
  return [
    wide("Tokens of your stream over time", picture(`Your longest wait: ${found.arms.map((arm, n) => `${arm.name} ${time(worst[n])}`).join(", ")}`, WIDTH, 78 * found.arms.length + 24,
      ...axis(78 * found.arms.length + 4, until, scale),
      ...found.arms.flatMap((arm, n) => stallArm(arm, 78 * n, scale)))),
    legend(["decode", "a gap between two of your tokens"], ["prefill", "a chunk of the visitor's prompt"], ["worst", "outlined: your longest gap"]),
    table(`Gaps of your stream, and a prompt of ${plural(found.arms[0].requests[1].num_prompt, "token")}`, ["the prompt runs", "your longest gap", "your usual gap", "the visitor's TTFT"],
      found.arms.map((arm, n) => el("tr", {"data-arm": arm.name, "data-gap": worst[n], "data-ttft": first[n]},
        el("th", {scope: "row"}, arm.name), el("td", {}, time(worst[n])), el("td", {}, time(usual[n])), el("td", {}, time(first[n]))))),
    sentence(found.arms.length > 1
      ? `In one piece the prompt stopped your stream for ${time(worst[0])}, ${figure(worst[0] / usual[0])} usual gaps. In chunks your longest gap was ${time(worst[1])}: a token of yours comes between two chunks. With a goal it was ${time(worst[2])}, and your usual gap ${time(usual[2])}: the engine fills the time that you allow. The visitor waited ${time(first[0])}, ${time(first[1])} and ${time(first[2])} for the first token: chunks help those who already decode, not the prompt itself.${pooled(found, worst, first)}`
      : `Your longest gap was ${time(worst[0])}, ${figure(worst[0] / usual[0])} usual gaps. To compare chunk sizes, start the server with “twostroke learn”: it may start engines with other settings.`),
  ];
}

// Returns the sentence about the arm with an engine for each phase, if there is such an arm.
function pooled(found, worst, first) {
  const n = found.arms.findIndex((arm) => arm.name === "two pools");
  return n < 0 ? "" : ` With two pools an engine reads prompts and another one writes, each with half of the cores: your longest gap was ${time(worst[n])}, and the visitor waited ${time(first[n])}.`;
}

function stallArm(arm, top, scale) {
  const zero = startOf(arm), steps = byNumber(arm), [you, visitor] = arm.requests;
  const worst = longestGap(you).step;
  const tokens = gaps(you).map(({at, seconds, step}) => ({
    from: at - seconds - zero, to: at - zero, kind: step === worst ? "decode worst" : "decode", title: `${time(seconds)} between two tokens`,
    data: {"data-step": step, "data-seconds": seconds, "data-who": "you"},
  }));
  const chunks = visitor.chunks.map(([, number, , size]) => {
    const step = steps.get(number), to = step.committed_s - zero;
    return {from: to - step.device_s, to, kind: "prefill", title: `${plural(size, "token")} in a step of ${time(step.device_s)}`, data: {"data-step": number, "data-seconds": step.device_s, "data-who": "visitor"}};
  });
  return [
    svg("text", {x: 0, y: top + 14, class: "lane"}, arm.name),
    svg("text", {x: 96, y: top + 32, class: "tick end"}, "you"),
    svg("text", {x: 96, y: top + 56, class: "tick end"}, "visitor"),
    ...lane(top + 18, 20, tokens, scale), ...lane(top + 42, 20, chunks, scale),
  ];
}

// ── the batch ────────────────────────────────────────────────────────────────────────────────────

// Returns the median time of steps without prefill, by the number of streams in them.
export function byStreams(arm) {
  const found = new Map();
  for (const step of onlyDecodes(arm)) {
    if (!found.has(step.decode.rows)) found.set(step.decode.rows, []);
    found.get(step.decode.rows).push(step);
  }
  return [1, 2, 4, 8, 16].filter((streams) => found.get(streams)?.length > 2).map((streams) => {
    const steps = found.get(streams), seconds = median(steps.map((one) => one.device_s));
    return {streams, seconds, rate: streams / seconds, flops: steps[0].decode.flops / seconds, moved: steps[0].decode.num_bytes / seconds};
  });
}

function batch(found) {
  const rows = byStreams(found.arms[0]);
  const [one, most] = [rows[0], rows.at(-1)];
  const best = Math.max(...rows.map((row) => row.rate)), longest = Math.max(...rows.map((row) => row.seconds));
  return [
    table("Decode steps by the number of streams in them", ["streams", "a step takes", "", "all streams together", ""],
      rows.map((row) => el("tr", {"data-streams": row.streams, "data-seconds": row.seconds},
        el("th", {scope: "row"}, String(row.streams)), el("td", {}, time(row.seconds)), el("td", {}, bar(row.seconds / longest, "decode")),
        el("td", {}, `${figure(row.rate)} tokens/s`), el("td", {}, bar(row.rate / best, "cached")))), BARS),
    sentence(`A step for ${most.streams} streams took ${figure(most.seconds / one.seconds)} times as long as one for a single stream and wrote ${most.streams} times as many tokens: ${figure(most.rate / one.rate)} times the tokens a second. The weights are read once for all of them.${flattened(rows)}`),
  ];
}

// Returns a sentence if the last increase of streams hardly raised the rate: compute is the limit.
function flattened(rows) {
  const before = rows.at(-2), most = rows.at(-1);
  if (!before || most.rate > 1.25 * before.rate) return "";
  return ` From ${before.streams} to ${most.streams} streams the tokens a second hardly grew: here the arithmetic decides, as on the right of the ridge in lesson 3.`;
}

const bar = (share, kind) => svg("svg", {viewBox: "0 0 100 10", class: "bar", "aria-hidden": "true", preserveAspectRatio: "none"}, svg("rect", {x: 0, y: 0, width: 100 * share, height: 10, class: `fill ${kind}`}));

// ── the context ──────────────────────────────────────────────────────────────────────────────────

export function byContext(arm) {
  const steps = byNumber(arm);
  return arm.requests.map((request) => {
    const last = request.chunks.at(-1)?.[1];
    const seconds = median(request.token_step.filter((step) => step !== last && steps.has(step)).map((step) => steps.get(step).device_s));
    return {context: request.num_prompt, seconds, cache: request.num_prompt * knownFacts().figures.kv_bytes_per_token, ttft: ttft(request), tpot: tpot(request)};
  });
}

function context(found) {
  const rows = byContext(found.arms[0]), {figures} = knownFacts();
  const weights = figures.layer_weight_bytes + figures.head_weight_bytes;
  const [least, most] = [rows[0], rows.at(-1)], longest = Math.max(...rows.map((row) => row.seconds));
  const disturbed = rows.some((row, n) => n > 0 && row.seconds < 0.8 * rows[n - 1].seconds);
  return [
    table(`A decode step reads ${bytes(weights)} of weights, and the cache`, ["tokens before it", "cache that it reads", "a step takes", ""],
      rows.map((row) => el("tr", {"data-context": row.context, "data-seconds": row.seconds},
        el("th", {scope: "row"}, count(row.context)), el("td", {}, bytes(row.cache)), el("td", {}, time(row.seconds)), el("td", {}, bar(row.seconds / longest, "decode")))), BARS),
    sentence(`Behind ${plural(most.context, "token")} a step took ${time(most.seconds)}, behind ${plural(least.context, "token")} ${time(least.seconds)}. The long prompt's cache is ${bytes(most.cache)}, ${percent(most.cache / weights)} of the bytes of the weights, and the step not only reads it but also computes with it.`),
    ...disturbed ? [sentence("The machine had other work meanwhile: some steps took longer than steps that read more. Run it again.")] : [],
  ];
}

// ── a prefix hit ─────────────────────────────────────────────────────────────────────────────────

function prefix(found) {
  const [first, second] = found.arms[0].requests, longest = ttft(first);
  return [
    table("Prompt tokens of both requests", ["request", "prompt", "from the cache", "computed", "TTFT", ""],
      [first, second].map((one) => el("tr", {"data-cached": one.num_cached, "data-ttft": ttft(one)},
        el("th", {scope: "row"}, one.name), el("td", {}, count(one.num_prompt)), el("td", {}, count(one.num_cached)), el("td", {}, count(one.num_prompt - one.num_cached)), el("td", {}, time(ttft(one))), el("td", {}, bar(ttft(one) / longest, "prefill")))), BARS),
    sentence(`The second request took ${count(second.num_cached)} of its ${count(second.num_prompt)} prompt tokens from the cache and had its first token after ${time(ttft(second))} instead of ${time(ttft(first))}. The cache is reused by whole blocks, here of ${found.arms[0].block_size} tokens. The last token of a prompt is always computed, as it predicts the next one, so its block was computed again.`),
  ];
}

// ── a full cache ─────────────────────────────────────────────────────────────────────────────────

function fullCache(found) {
  const until = Math.max(...found.arms.map((arm) => Math.max(...arm.requests.map((one) => one.token_s.at(-1))) - startOf(arm)));
  const label = 104, scale = (at) => label + (WIDTH - label - 24) * at / until;
  const tall = (arm) => 26 + 18 * arm.requests.length + 8;
  const tops = found.arms.map((_, n) => sum(found.arms.slice(0, n).map(tall)));
  const height = sum(found.arms.map(tall));
  const arm = found.arms[0], hit = arm.requests.filter((one) => one.preempted.length);
  const again = sum(arm.requests.flatMap((one) => one.preempted.map(([, tokens]) => tokens)));
  return [
    wide("Streams over time", picture(`${plural(hit.length, "stream")} preempted`, WIDTH, height + 22, ...axis(height + 4, until, scale),
      ...found.arms.flatMap((one, n) => cacheArm(one, tops[n], scale)))),
    legend(["prefill", "prefill, also for the second time"], ["decode", "decode"], ["preemption", "preempted: it waits without blocks"]),
    sentence(found.arms.length === 1 && !hit.length
      ? `This server's cache has room for ${count(arm.kv_tokens)} tokens, so four streams do not fill it. Start the server with “twostroke learn” to see a small one.`
      : hit.length
        ? `With ${arm.name} there was room for ${count(arm.kv_tokens)} tokens: ${plural(hit.length, "stream")} of 4 had to give back blocks and compute ${count(again)} tokens again.${found.arms.length > 1 ? ` With ${found.arms[1].name} nothing was preempted.` : ""}`
        : "Nothing was preempted this time: the streams took turns before the cache was full."),
  ];
}

function cacheArm(arm, top, scale) {
  const zero = startOf(arm), steps = byNumber(arm);
  const rows = arm.requests.flatMap((request, n) => {
    const y = top + 22 + 18 * n, prefill = new Set(request.chunks.map(([, step]) => step));
    const boxes = [...new Set([...prefill, ...request.token_step])].filter((step) => steps.has(step)).map((number) => {
      const step = steps.get(number), to = step.committed_s - zero;
      return {from: to - step.device_s, to, kind: prefill.has(number) ? "prefill" : "decode", data: {"data-step": number}};
    });
    const waits = request.preempted.map(([at]) => {
      const back = request.chunks.find(([when]) => when > at)?.[0] ?? at;
      return {from: at - zero, to: back - zero, kind: "preemption", title: "preempted", data: {"data-preempted": at}};
    });
    return [svg("text", {x: 96, y: y + 11, class: "tick end"}, request.name), ...lane(y, 14, boxes, scale), ...lane(y, 14, waits, scale)];
  });
  return [svg("text", {x: 0, y: top + 14, class: "lane"}, `${arm.name}, room for ${count(arm.kv_tokens)} tokens`), ...rows];
}
