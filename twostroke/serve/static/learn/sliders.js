// Prompt, answer, model and hardware → TTFT, TPOT and total, with the formula and its numbers.
import {el} from "../shared/dom.js";
import * as cost from "./cost.js";
import {bytes, count, figure, logStops, picture, plural, short, svg, time} from "./draw.js";
import {getFacts, knownFacts, thisMachine} from "./source.js";
import {numberParam, textParam} from "./state.js";
import {choice, fact, formula, legend, slider} from "./widgets.js";

export const HERE = "this machine";

// The model and the machine that the URL's parameters select.
export function chosen() {
  const facts = knownFacts();
  const model = textParam("model", facts.model);
  const weights = textParam("weights", "16 bits"), kv = textParam("kv", "16 bits");
  const served = !cost.MODELS.includes(model);
  const figures = served ? facts.figures : cost.figuresOf(model, cost.WEIGHTS[weights] ?? 2, cost.KV[kv] ?? 2);
  const listed = facts.hardware.find((one) => one.name === textParam("hardware", HERE));
  return {model, served, figures, machine: listed ?? thisMachine()};
}

export function modelChoices(redraw) {
  const facts = knownFacts();
  return [
    choice({name: "model", label: "Model", options: [facts.model, ...cost.MODELS], value: textParam("model", facts.model), onchange: redraw}),
    choice({name: "hardware", label: "Hardware", options: [HERE, ...facts.hardware.map((one) => one.name)], value: textParam("hardware", HERE), onchange: redraw}),
  ];
}

export function formatChoices(redraw) {
  return [
    choice({name: "weights", label: "Weights (of the larger models)", options: Object.keys(cost.WEIGHTS), value: textParam("weights", "16 bits"), onchange: redraw}),
    choice({name: "kv", label: "KV cache (of the larger models)", options: Object.keys(cost.KV), value: textParam("kv", "16 bits"), onchange: redraw}),
  ];
}

export async function sliders() {
  await getFacts();
  const out = el("div", {class: "stack", "data-view": "sliders"});
  let prompt = numberParam("prompt", 512), answer = numberParam("answer", 128);
  const result = el("div", {class: "stack", "aria-live": "off"});
  const draw = () => result.replaceChildren(...results(prompt, answer));
  out.append(
    el("div", {class: "controls"},
      slider({name: "prompt", label: "Prompt", stops: logStops(16, 8192), value: prompt, show: (n) => plural(n, "token"), onchange: (n) => { prompt = n; draw(); }}),
      slider({name: "answer", label: "Answer", stops: logStops(2, 2048), value: answer, show: (n) => plural(n, "token"), onchange: (n) => { answer = n; draw(); }}),
      ...modelChoices(draw)),
    result);
  draw();
  untilMeasured(out, draw);
  return out;
}

// Redraws the view when this machine's ceilings have been measured, which the server does while idle.
export function untilMeasured(view, draw) {
  if (thisMachine()) return;
  const ask = async () => {
    if (!view.isConnected) return;
    try { await getFacts(); } catch { /* the next try may succeed */ }
    if (thisMachine()) draw(); else setTimeout(ask, 2500);
  };
  setTimeout(ask, 2500);
}

function results(prompt, answer) {
  const {figures, machine, model} = chosen();
  if (!machine) return [measuring()];
  const found = cost.request(figures, machine, prompt, answer);
  const {first, step} = found;
  const pre = cost.prefillWork(figures, prompt), dec = cost.decodeWork(figures, prompt + answer / 2);
  const tooLarge = machine.memory_bytes && cost.weightBytes(figures) > machine.memory_bytes;
  return [
    el("dl", {class: "facts"},
      fact("Time to first token (TTFT)", time(found.ttft), `bound by ${first.bound}`, "prefill"),
      fact("Time per output token (TPOT)", time(found.tpot), `bound by ${step.bound}`, "decode"),
      fact("Whole answer", time(found.total), `${figure(answer / found.total)} tokens a second, prefill included`)),
    bar(found),
    legend(["prefill", "prefill: reads the prompt"], ["decode", "decode: writes the answer"]),
    el("table", {class: "formulas"},
      el("caption", {}, `The least time that ${model} needs on ${machine.name}`),
      el("tbody", {},
        formula("Prefill, compute", `(${count(prompt)} tokens × ${short(figures.flops_per_token, "FLOP")} + last token's scores ${short(figures.flops_per_sample, "FLOP")} + attention ${short(pre.attention, "FLOP")}) ÷ ${short(machine.flops_per_s, "FLOP/s")}`, time(first.compute), first.bound === "compute" ? "decides" : ""),
        formula("Prefill, memory", `(weights ${bytes(pre.weights)} + keys and values ${bytes(pre.kv)}) ÷ ${short(machine.bytes_per_s, "B/s")}`, time(first.memory), first.bound === "memory" ? "decides" : ""),
        formula("Decode, compute", `(${short(figures.flops_per_token, "FLOP")} + scores ${short(figures.flops_per_sample, "FLOP")} + attention ${short(dec.attention, "FLOP")}) ÷ ${short(machine.flops_per_s, "FLOP/s")}`, time(step.compute), step.bound === "compute" ? "decides" : ""),
        formula("Decode, memory", `(weights ${bytes(dec.weights)} + keys and values ${bytes(dec.kv)}) ÷ ${short(machine.bytes_per_s, "B/s")}`, time(step.memory), step.bound === "memory" ? "decides" : ""),
        formula("Whole answer", `TTFT ${time(found.ttft)} + ${count(answer - 1)} × TPOT ${time(found.tpot)}`, time(found.total), "sum"))),
    el("p", {class: "note"}, "The longer of the two times decides a phase. Scores: one for each token that could come next. Prefill writes the first token, so decode writes one fewer. Decode is shown in the middle of the answer. ",
      tooLarge ? `These weights do not fit into ${bytes(machine.memory_bytes)}: several such devices would have to share them.`
        : "A real engine takes longer than the least time: on a CPU, prefill of a small model takes two to three times as long. “Predict, then run” in lesson 5 measures this engine."),
  ];
}

export const measuring = () => el("p", {class: "note", role: "status"},
  "The server measures how fast this machine computes and reads memory. It starts when the engine is idle and takes a few seconds. Meanwhile, pick hardware from the list.");

function bar(found) {
  const width = 760, share = Math.max(0.006, found.ttft / found.total);
  return picture(`Prefill takes ${time(found.ttft)} of ${time(found.total)}`, width, 30,
    svg("rect", {x: 0, y: 2, width: width * share, height: 26, class: "fill prefill"}),
    svg("rect", {x: width * share, y: 2, width: width * (1 - share), height: 26, class: "fill decode"}));
}
