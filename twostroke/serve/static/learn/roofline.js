// The roofline: the steps of the engine as dots, and the minimum times (floors) of both phases.
import {el} from "../shared/dom.js";
import * as cost from "./cost.js";
import {figure, logStops, picture, plural, short, svg, time} from "./draw.js";
import {onlyDecodes, onlyPrefills} from "./records.js";
import {getFacts, lastRun, run, thisMachine} from "./source.js";
import {chosen, formatChoices, HERE, measuring, modelChoices, untilMeasured} from "./sliders.js";
import {numberParam} from "./state.js";
import {fact, legend, runButton, slider, wide} from "./widgets.js";

const WIDTH = 760, HEIGHT = 400, LEFT = 74, BOTTOM = 44, TOP = 14, RIGHT = 30;
const SHOWN = ["text", "batch", "context", "predict", "prefix"]; // runs whose steps become dots

export async function roofline() {
  await getFacts();
  let prompt = numberParam("prompt", 512), context = numberParam("context", 512), batch = numberParam("batch", 1);
  const out = el("div", {class: "stack", "data-view": "roofline"});
  const plot = el("div", {class: "stack"});
  const draw = () => plot.replaceChildren(...results(prompt, context, batch));
  const amount = (name, label, low, high, value, unit, set) => slider({
    name, label, stops: logStops(low, high), value, show: (n) => plural(n, unit), onchange: (n) => { set(n); draw(); },
  });
  out.append(
    el("div", {class: "controls"},
      amount("prompt", "Prompt (prefill)", 1, 8192, prompt, "token", (n) => { prompt = n; }),
      amount("context", "Context (decode)", 16, 32768, context, "token", (n) => { context = n; }),
      amount("batch", "Batch (decode)", 1, 512, batch, "stream", (n) => { batch = n; }),
      ...modelChoices(draw)),
    el("details", {class: "panel"}, el("summary", {}, "Formats of weights and cache"), el("div", {class: "controls"}, formatChoices(draw))),
    runButton("Run 1, 2, 4, 8 and 16 streams on the engine", async () => { await run("batch"); draw(); }),
    plot);
  draw();
  untilMeasured(out, draw);
  return out;
}

// Returns the steps that ran: [{phase, intensity, rate, step, rows, …}].
export function dots() {
  const found = [];
  for (const name of SHOWN) {
    for (const arm of lastRun(name)?.arms ?? []) {
      for (const [phase, steps] of [["prefill", onlyPrefills(arm)], ["decode", onlyDecodes(arm)]]) {
        for (const step of steps) {
          const {flops, num_bytes: moved, rows, tokens} = step[phase];
          if (step.device_s > 0) found.push({phase, rows, tokens, step: step.step, seconds: step.device_s, intensity: flops / moved, rate: flops / step.device_s});
        }
      }
    }
  }
  return found;
}

function results(prompt, context, batch) {
  const {figures, machine, served} = chosen();
  if (!machine) return [measuring()];
  const first = cost.floor(cost.prefillWork(figures, prompt), machine);
  const step = cost.floor(cost.decodeWork(figures, context, batch), machine);
  const work = cost.decodeWork(figures, context, batch);
  const ridge = cost.ridge(machine);
  const here = machine.name === HERE && served;
  const ran = here ? dots() : [];
  return [
    el("dl", {class: "facts"},
      fact("Prefill", `${figure(first.intensity)} FLOP/B`, `bound by ${first.bound}: at least ${time(first.seconds)}`, "prefill"),
      fact("Decode step", `${figure(step.intensity)} FLOP/B`, `bound by ${step.bound}: at least ${time(step.seconds)}`, "decode"),
      fact("Ridge of this machine", `${figure(ridge)} FLOP/B`, "below it memory decides, above it compute")),
    wide("Roofline", plot(machine, ridge, first, step, ran)),
    legend(["prefill", "prefill"], ["decode", "decode"], ["floor", "ring: the least time, dot: a step that ran"]),
    el("p", {class: "sentence"}, sentence(work, step, ridge, batch)),
    here && !ran.length ? el("p", {class: "note"}, "No step has run from this page yet: run some streams above, or your own prompt.") : "",
    here ? "" : el("p", {class: "note"}, `Dots are shown for the served model on ${HERE}.`),
  ];
}

function sentence(work, step, ridge, batch) {
  const share = work.kv / work.bytes;
  const streams = plural(batch, "stream");
  if (step.intensity >= ridge) return `With ${streams} a decode step does so much with each byte that compute decides.`;
  if (share > 0.5) return `With ${streams} most bytes of a decode step are keys and values (${figure(100 * share)} %). Each stream brings its own, so a larger batch hardly moves the ring to the right.`;
  return `With ${streams} a decode step does ${figure(step.intensity)} FLOPs with each byte and would need ${figure(ridge)} to be bound by compute. A larger batch reads the same weights for more tokens: the ring moves right.`;
}

function plot(machine, ridge, first, step, ran) {
  const all = [ridge, first.intensity, step.intensity, ...ran.map((one) => one.intensity)];
  const low = 10 ** Math.floor(Math.log10(Math.min(...all) / 2)), high = 10 ** Math.ceil(Math.log10(Math.max(...all) * 2));
  const roof = (intensity) => Math.min(machine.flops_per_s, intensity * machine.bytes_per_s);
  const top = 10 ** Math.ceil(Math.log10(Math.max(machine.flops_per_s, ...ran.map((one) => one.rate)) * 1.2));
  const bottom = 10 ** Math.floor(Math.log10(Math.min(roof(low), ...ran.map((one) => one.rate))));
  const x = (value) => LEFT + (WIDTH - LEFT - RIGHT) * Math.log(value / low) / Math.log(high / low);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.log(value / bottom) / Math.log(top / bottom));
  const decades = (from, to) => Array.from({length: Math.round(Math.log10(to / from)) + 1}, (_, n) => from * 10 ** n);
  const ring = (phase, floor) => svg("circle", {cx: x(floor.intensity), cy: y(roof(floor.intensity)), r: 9, class: `ring ${phase}`}, svg("title", {}, `${phase} at its floor`));
  return picture(`Roofline of ${machine.name}: ${plural(ran.length, "step")} that ran, ridge at ${figure(ridge)} FLOPs a byte`, WIDTH, HEIGHT,
    ...decades(low, high).map((one) => [
      svg("line", {x1: x(one), x2: x(one), y1: TOP, y2: HEIGHT - BOTTOM, class: "grid"}),
      svg("text", {x: x(one), y: HEIGHT - BOTTOM + 17, class: "tick middle"}, one >= 1 ? short(one) : String(one))]).flat(),
    ...decades(bottom, top).map((one) => [
      svg("line", {x1: LEFT, x2: WIDTH - RIGHT, y1: y(one), y2: y(one), class: "grid"}),
      svg("text", {x: LEFT - 7, y: y(one) + 4, class: "tick end"}, short(one))]).flat(),
    svg("text", {x: (LEFT + WIDTH) / 2, y: HEIGHT - 6, class: "tick middle"}, "FLOPs per byte of memory traffic"),
    svg("text", {x: 12, y: (HEIGHT - BOTTOM) / 2, class: "tick middle", transform: `rotate(-90 12 ${(HEIGHT - BOTTOM) / 2})`}, "FLOPs per second"),
    svg("polyline", {points: `${x(low)},${y(roof(low))} ${x(ridge)},${y(machine.flops_per_s)} ${x(high)},${y(machine.flops_per_s)}`, class: "roof"}),
    svg("line", {x1: x(ridge), x2: x(ridge), y1: y(machine.flops_per_s), y2: HEIGHT - BOTTOM, class: "ridge"}),
    svg("text", {x: x(ridge) + 5, y: HEIGHT - BOTTOM - 6, class: "tick"}, `ridge ${figure(ridge)}`),
    ...ran.map((one) => svg("circle", {
      cx: x(one.intensity), cy: y(one.rate), r: 3.2, class: `dot ${one.phase}`, "data-step": one.step, "data-intensity": one.intensity, "data-rate": one.rate,
    }, svg("title", {}, `step ${one.step}: ${plural(one.tokens, "token")}, ${time(one.seconds)}`))),
    ring("prefill", first), ring("decode", step));
}
