// The candidates for a token, and their probabilities after temperature and top-p.
import {el} from "../shared/dom.js";
import {figure, percent, visible} from "./draw.js";
import {slider} from "./widgets.js";

const SHOWN = 8;

// Returns the probabilities of the candidates after temperature and top-p, likeliest first.
export function reshaped(logprobs, temperature, topP) {
  const best = Math.max(...logprobs);
  if (temperature === 0) return logprobs.map((one) => one === best ? 1 : 0);
  const weights = logprobs.map((one) => Math.exp((one - best) / temperature));
  const whole = weights.reduce((sum, one) => sum + one, 0);
  let before = 0;
  const kept = weights.map((one) => {
    const keep = before < topP;
    before += one / whole;
    return keep ? one : 0;
  });
  const left = kept.reduce((sum, one) => sum + one, 0);
  return kept.map((one) => one / left);
}

export function candidatePanel(found) {
  const entries = found.arms[0].requests[0].candidates;
  let temperature = 1, topP = 1, at = 0;
  const list = el("div", {class: "stack"});
  const draw = () => {
    const entry = entries[at];
    if (!entry) {
      list.replaceChildren(el("p", {class: "note"}, "No token has been written yet."));
      return;
    }
    const shares = reshaped(entry.logprobs, temperature, topP);
    list.replaceChildren(
      el("p", {class: "note"}, `For output token ${at + 1} the engine chose “${visible(found.vocabulary[entry.chosen])}”.`),
      el("ol", {class: "candidates"}, entry.ids.slice(0, SHOWN).map((token, n) => el("li", {"data-token": token, "data-share": shares[n]},
        el("span", {class: "word"}, visible(found.vocabulary[token])),
        el("meter", {min: 0, max: 1, value: shares[n], "aria-label": `Probability of ${visible(found.vocabulary[token])}`}),
        el("span", {class: "share"}, percent(shares[n]))))));
  };
  const tenths = (from, to, step) => Array.from({length: Math.round((to - from) / step) + 1}, (_, n) => Number((from + n * step).toFixed(2)));
  draw();
  return {
    element: el("details", {class: "panel", "data-panel": "candidates"}, el("summary", {}, "Candidates for the newest token"),
      el("p", {class: "note"}, "The model gives every token a probability. Temperature sharpens or flattens them; top-p cuts the tail. Shown are the first eight of the 20 likeliest, with their shares among those."),
      el("div", {class: "controls"},
        slider({name: "temperature", label: "Temperature", stops: tenths(0, 2, 0.1), value: temperature, show: figure, onchange: (value) => { temperature = value; draw(); }}),
        slider({name: "top_p", label: "Top-p", stops: tenths(0.05, 1, 0.05), value: topP, show: figure, onchange: (value) => { topP = value; draw(); }})),
      list),
    show: (token) => { at = Math.max(0, Math.min(entries.length - 1, token)); draw(); },
  };
}
