// "Predict, then run": compares the prediction of the engine's step-time model with a run.
import {el} from "../shared/dom.js";
import {bytes, count, percent, plural, time} from "./draw.js";
import {median, sum, tpot, ttft} from "./records.js";
import {getFacts, isRecorded, predict as ask, recordedSettings, run} from "./source.js";
import {numberParam} from "./state.js";
import {fact, formula, nearest, runButton, slider, table} from "./widgets.js";

const PROMPTS = [32, 64, 128, 256, 384, 512, 768, 1024, 1536], ANSWERS = [8, 16, 32, 64, 96, 128], STREAMS = [1, 2, 4, 8];
const ROUNDS = 3;

export async function predict() {
  const facts = await getFacts();
  const {limits} = facts, only = recordedSettings();
  const stops = (name, all, most) => only ? [...new Set(only.map((one) => one[name]))].sort((a, b) => a - b) : all.filter((one) => one <= most);
  const settings = {
    prompt_tokens: numberParam("prompt", 256), output_tokens: numberParam("answer", 32), streams: numberParam("streams", 1),
  };
  const out = el("div", {class: "stack", "data-view": "predict"});
  const expected = el("div", {class: "stack"}), outcome = el("div", {class: "stack", "data-part": "outcome"});
  const running = el("div", {class: "running"});
  let newest = 0;
  const update = async () => {
    const number = ++newest;
    const found = await ask(settings);
    if (number !== newest) return found;
    outcome.replaceChildren();
    expected.replaceChildren(...(found ? prediction(found, settings) : [el("p", {class: "note"}, "The engine has not run enough steps for a prediction. Let it run requests of different sizes first.")]));
    running.replaceChildren(
      found ? runButton("Run it three times and compare", async () => compare(found), {name: "predict"}) : "",
      isRecorded ? "" : runButton("Let the engine learn: about thirty requests of many sizes", async () => { await run("calibration"); await update(); }, {primary: !found, name: "calibration"}));
    return found;
  };
  const compare = async (found) => {
    const arm = (await run("predict", {...settings, rounds: ROUNDS})).arms[0];
    outcome.replaceChildren(...errors(found, arm, settings, facts));
  };
  const control = (name, key, label, list, unit) => {
    settings[key] = list[nearest(list, settings[key])];
    return slider({
      name, label, stops: list, value: settings[key], show: (n) => unit ? plural(n, unit) : count(n),
      onchange: (n) => { settings[key] = n; update().catch((error) => expected.replaceChildren(el("p", {class: "error", role: "alert"}, error.message))); },
    });
  };
  out.append(
    el("div", {class: "controls"},
      control("prompt", "prompt_tokens", "Prompt", stops("prompt_tokens", PROMPTS, limits.prompt_tokens), "token"),
      control("answer", "output_tokens", "Answer", stops("output_tokens", ANSWERS, limits.output_tokens), "token"),
      control("streams", "streams", "Streams that arrive together", stops("streams", STREAMS, limits.streams), "")),
    expected, running, outcome);
  await update();
  return out;
}

function prediction(found, settings) {
  const prefill = found.steps.filter((step) => step.prefill_tokens), decode = found.steps.filter((step) => !step.prefill_tokens);
  const mean = decode.length ? decode.reduce((sum, step) => sum + step.seconds, 0) / decode.length : 0;
  return [
    el("dl", {class: "facts", "data-part": "prediction"},
      fact("TTFT", time(found.ttft_s), "predicted", "prefill"),
      fact("TPOT", time(found.tpot_s), "predicted", "decode"),
      fact("KV cache", bytes(found.kv_bytes), `${count(found.kv_tokens)} tokens, predicted; an answer's last token is not kept`)),
    el("table", {class: "formulas"}, el("tbody", {},
      formula("TTFT", `start ${time(found.start_s)} + ${prefill.map((step) => `${count(step.prefill_tokens)} tokens ${time(step.seconds)}`).slice(0, 4).join(" + ")}${prefill.length > 4 ? " + …" : ""}`, time(found.ttft_s)),
      formula("TPOT", `decode step ${time(mean)} + host ${time(found.host_s)}${settings.streams > 1 ? "; other prompts come between" : ""}`, time(found.tpot_s)))),
  ];
}

// Means over the streams of a round, medians over the rounds, because other work may slow down a round.
function errors(found, arm, settings, facts) {
  const {streams} = settings;
  const rounds = arm.requests.map((_, n) => arm.requests.slice(n, n + streams)).filter((_, n) => n % streams === 0);
  const typical = (figureOf) => median(rounds.map((round) => sum(round.map(figureOf)) / round.length));
  const maxUsed = Math.max(...arm.steps.map((step) => step.kv.used));
  const rows = [
    ["TTFT", found.ttft_s, typical(ttft), time],
    ["TPOT", found.tpot_s, typical(tpot), time],
    ["KV cache", found.kv_bytes, maxUsed * facts.figures.kv_bytes_per_token, bytes],
  ];
  const worst = rows.slice(0, 2).map(([, expected, measured]) => Math.abs(expected / measured - 1));
  const off = sum(worst) / worst.length;
  return [
    table(`Predicted, and the median of ${plural(rounds.length, "run")}`, ["", "predicted", "measured", "error"],
      rows.map(([name, expected, measured, write]) => el("tr", {"data-row": name, "data-expected": expected, "data-measured": measured},
        el("th", {scope: "row"}, name), el("td", {}, write(expected)), el("td", {}, write(measured)), el("td", {}, measured ? percent(expected / measured - 1) : "–")))),
    el("p", {class: "sentence"}, off <= 0.1
      ? "The prediction holds: the mean error of TTFT and TPOT is at most 10 %. The prediction has two kinds of steps, with prefill and without, and the time of a token in each of them. Start is the time before the first step, host the time between two steps."
      : "The prediction is off: the machine had other work, or the engine has seen few steps of this size. Measure the engine again, then run it again."),
  ];
}
