// The source of the page's data: the server, or the recording in an exported page.
import {getJson, postJson} from "../shared/api.js";

const recording = document.getElementById("recording");
const recorded = recording && JSON.parse(recording.textContent);

export const isRecorded = recorded !== null;
let facts = recorded?.facts ?? null;

// Returns the facts of model and machine; reads them again until the machine has been measured.
export async function getFacts() {
  if (!recorded && !(facts?.ops_per_s)) facts = await getJson("learn/facts");
  return facts;
}

// Returns the facts that were read last.
export const knownFacts = () => facts;

// Reads the present facts, for figures that change, such as the use of the cache.
export const freshFacts = async () => recorded ? facts : getJson("learn/facts");

// Returns the machine's measured ceilings, for cost.js; null until they are measured.
export function thisMachine() {
  if (!facts?.ops_per_s || !facts?.read_bytes_per_s) return null;
  return {
    name: "this machine", flops_per_s: facts.ops_per_s, bytes_per_s: facts.read_bytes_per_s,
    memory_bytes: facts.total_bytes,
  };
}

const results = new Map(); // the newest run of each experiment, for pictures and for tests

// Runs an experiment, or returns its recording.
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

// Returns the index of the recorded settings that are nearest to `settings`.
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

// Runs one request with these numbers of tokens, within the model's limits.
export async function measured(prompt, answer) {
  const {limits} = await getFacts();
  const settings = {prompt_tokens: Math.min(prompt, limits.prompt_tokens), output_tokens: Math.min(answer, limits.output_tokens), streams: 1};
  return (await run("predict", settings)).arms[0];
}

// Returns the newest run of an experiment; runs it if there is none.
export const once = async (experiment) => lastRun(experiment) ?? run(experiment);

// Returns the settings that a recording offers; null without a recording.
export const recordedSettings = () => recorded?.runs.predict.filter((one) => one.offered).map((one) => one.settings) ?? null;

export async function attention(tokens, layer, head) {
  if (!recorded) return postJson("learn/attention", {tokens, layer, head});
  const {heads, maps} = recorded.attention;
  const shares = Uint8Array.from(atob(maps[layer][head]), (one) => one.charCodeAt(0));
  const rows = tokens.map((_, n) => Array.from(shares.slice(n * (n + 1) / 2, (n + 1) * (n + 2) / 2), (one) => one / 255));
  return {layer, head, heads, rows};
}
