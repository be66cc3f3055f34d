// The figures of an answer: the engine's (`timings`, `usage`) if it has sent them, or else those that
// this page has measured.

export const CAUSES = ["decode", "prefill", "preemption", "host", "communication", "drafting"];
export const CAUSE_NAMES = {
  decode: "own decode",
  prefill: "prefill of others",
  preemption: "preemption",
  host: "host",
  communication: "communication",
  drafting: "draft model",
};
const CAUSE_TEXTS = {
  decode: "the step's work for this stream and the other decoding streams",
  prefill: "prompts of other requests in the same step",
  preemption: "steps without this stream: it was preempted, or there was no free KV block",
  host: "the device waited for planning, committing or the operating system",
  communication: "collectives, and waiting for other ranks",
  drafting: "the steps of the draft model",
};
export const causeText = (cause) => CAUSE_TEXTS[cause];

export function formatMs(ms) {
  if (ms === null || ms === undefined || !Number.isFinite(ms)) return "–";
  if (ms < 0.05) return "0 ms";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

export const formatCount = (count) => count.toLocaleString("en");

// Returns the figures below an answer, each as [name, value, explanation].
export function figuresOf(answer) {
  const {timings, usage} = answer;
  const figures = [];
  if (timings) {
    const ttft = timings.queue_ms + timings.prefill_ms;
    figures.push(["TTFT", formatMs(ttft),
      `time to first token: ${formatMs(timings.queue_ms)} in the queue, ${formatMs(timings.prefill_ms)} prefill; `
      + `this page saw it after ${formatMs(answer.ttftMs)}`]);
    if (timings.predicted_n > 1) {
      figures.push(["", `${timings.predicted_per_second.toFixed(1)} tok/s`,
        `${formatCount(timings.predicted_n)} tokens, ${formatMs(timings.predicted_per_token_ms)} between two tokens`]);
    }
    const prompt = timings.prompt_n + timings.cache_n;
    figures.push(["cached", `${formatCount(timings.cache_n)} of ${formatCount(prompt)}`,
      `prompt tokens found in the prefix cache; the other ${formatCount(timings.prompt_n)} were computed`]);
    figures.push(["", `${formatCount(usage?.completion_tokens ?? timings.predicted_n)} tokens`, "written"]);
    if (timings.preemptions) figures.push(["preempted", `${timings.preemptions}×`, "lost its KV blocks, and was computed again"]);
  } else if (answer.chunks) {
    const seconds = (answer.totalMs - answer.ttftMs) / 1000;
    figures.push(["TTFT", formatMs(answer.ttftMs), "time to first token, as this page measured it"]);
    if (answer.chunks > 1 && seconds > 0) {
      figures.push(["", `${((answer.chunks - 1) / seconds).toFixed(1)} tok/s`, "as this page measured it"]);
    }
    figures.push(["", `${formatCount(answer.tokens.length || answer.chunks)} tokens`, "that arrived"]);
  }
  return figures;
}

// Returns the gap before each token, {ms, causes}; null for the first token. If the engine has sent no
// causes (the answer was stopped), `causes` is null and `ms` is the time between the arrivals.
export function gapsOf(answer) {
  const causesOfGaps = answer.timings?.token_gaps_ms;
  return answer.tokens.map((token, n) => {
    if (n === 0) return null;
    const causes = causesOfGaps?.[n - 1];
    if (causes) return {ms: causes.reduce((sum, ms) => sum + ms, 0), causes};
    return {ms: token[3] - answer.tokens[n - 1][3], causes: null};
  });
}

// Returns the cause with the largest part of a gap.
export const mainCause = (causes) => CAUSES[causes.indexOf(Math.max(...causes))];

// Returns the cause that colours a gap: its main cause, or, if the gap is much longer than usual, the
// main cause without the usual time of decode.
export function causeOf(gap, usualMs) {
  if (!gap?.causes) return null;
  if (gap.ms <= 1.5 * usualMs) return mainCause(gap.causes);
  const extra = gap.causes.map((ms, n) => (n === 0 ? Math.max(0, ms - usualMs) : ms));
  return mainCause(extra);
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : 0;
}
