// Figures computed from the records of a run.

export const arm = (run, n = 0) => run.arms[n];

export function startOf(one) {
  return Math.min(...one.requests.map((request) => request.received_s));
}

export const ttft = (request) => request.first_token_s - request.received_s;

export function tpot(request) {
  const times = request.token_s;
  return times.length > 1 ? (times.at(-1) - times[0]) / (times.length - 1) : 0;
}

export function gaps(request) {
  return request.token_s.slice(1).map((at, n) => ({at, seconds: at - request.token_s[n], step: request.token_step[n + 1]}));
}

export const longestGap = (request) => gaps(request).reduce((most, one) => one.seconds > most.seconds ? one : most, {seconds: 0});

export const byNumber = (one) => new Map(one.steps.map((step) => [step.step, step]));

export const onlyDecodes = (one) => one.steps.filter((step) => step.decode.tokens && !step.prefill.tokens);
export const onlyPrefills = (one) => one.steps.filter((step) => step.prefill.tokens && !step.decode.tokens);

export const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b);
  const half = sorted.length >> 1;
  return sorted.length ? (sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2) : 0;
};

export const sum = (values) => values.reduce((total, one) => total + one, 0);

// Returns the steps of one request in order: [{kind, step, tokens, seconds}].
export function life(request, steps) {
  const chunks = request.chunks.map(([, step, start, tokens]) => ({kind: "prefill", step, start, tokens}));
  const last = request.chunks.at(-1)?.[1];
  const writes = request.token_step.filter((step) => step !== last).map((step) => ({kind: "decode", step, tokens: 1}));
  return [...chunks, ...writes].map((one) => ({...one, seconds: steps.get(one.step)?.device_s ?? 0}));
}
