// Where the numbers come from: this server, or the recording inside an exported page.
import {getJson, postJson} from "../shared/api.js";

const recording = document.getElementById("recording");
const recorded = recording && JSON.parse(recording.textContent);

export const isRecorded = recorded !== null;
let facts = recorded?.facts ?? null;

// What the server says of model and machine. Asked again while the machine is still unmeasured.
export async function getFacts() {
  if (!recorded && !(facts?.ops_per_s)) facts = await getJson("learn/facts");
  return facts;
}

// As they were when a view last asked.
export const knownFacts = () => facts;

// The facts of now: the cache fills and empties.
export const freshFacts = async () => recorded ? facts : getJson("learn/facts");

// The machine's measured ceilings, as cost.js wants them; null until they are measured.
export function thisMachine() {
  if (!facts?.ops_per_s || !facts?.read_bytes_per_s) return null;
  return {
    name: "this machine", flops_per_s: facts.ops_per_s, bytes_per_s: facts.read_bytes_per_s,
    memory_bytes: facts.total_bytes,
  };
}

const results = new Map(); // the newest run of each experiment, for pictures and for tests

// Runs an experiment, or takes the recording of it.
export async function run(experiment, settings = {}) {
  const found = recorded ? recordedRun(experiment, settings) : await postJson("learn/run", {experiment, ...settings});
  results.set(experiment, found);
  return found;
}

export const lastRun = (experiment) => results.get(experiment) ?? null;

function recordedRun(experiment, settings) {
  const runs = recorded.runs[experiment];
  if (experiment === "text") return runs[results.has("text") ? 1 : 0] ?? runs[0];
  if (experiment !== "predict") return runs[0];
  return runs[nearest(settings)].run;
}

// Which of the recorded settings is the nearest to those asked for.
function nearest(settings) {
  const distance = ({settings: one}) => ["prompt_tokens", "output_tokens", "streams"]
    .reduce((sum, name) => sum + Math.abs(Math.log(one[name] / settings[name])), 0);
  const runs = recorded.runs.predict;
  return runs.indexOf(runs.reduce((best, one) => distance(one) < distance(best) ? one : best));
}

export async function predict(settings) {
  if (recorded) return recorded.runs.predict[nearest(settings)].prediction;
  return (await postJson("learn/predict", settings)).prediction;
}

// One request of so many tokens, as far as the model's limits allow.
export async function measured(prompt, answer) {
  const {limits} = await getFacts();
  const settings = {prompt_tokens: Math.min(prompt, limits.prompt_tokens), output_tokens: Math.min(answer, limits.output_tokens), streams: 1};
  return (await run("predict", settings)).arms[0];
}

// The newest run of an experiment; the first time, a new one.
export const once = async (experiment) => lastRun(experiment) ?? run(experiment);

// The settings that a recording has an answer for.
export const recordedSettings = () => recorded?.runs.predict.filter((one) => one.offered).map((one) => one.settings) ?? null;

export async function attention(tokens, layer, head) {
  if (!recorded) return postJson("learn/attention", {tokens, layer, head});
  const {heads, maps} = recorded.attention;
  const shares = Uint8Array.from(atob(maps[layer][head]), (one) => one.charCodeAt(0));
  const rows = tokens.map((_, n) => Array.from(shares.slice(n * (n + 1) / 2, (n + 1) * (n + 2) / 2), (one) => one / 255));
  return {layer, head, heads, rows};
}
