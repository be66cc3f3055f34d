// The attention of one layer and head over the prompt. The server computes it on request.
import {el} from "../shared/dom.js";
import {percent, picture, svg, visible} from "./draw.js";
import {attention, isRecorded, knownFacts} from "./source.js";
import {runButton, slider, wide} from "./widgets.js";

const MAX_TOKENS = 64;

export function attentionPanel(tokens) {
  const {layers, heads} = knownFacts().figures;
  const out = el("div", {class: "stack"});
  const shownTokens = tokens.slice(0, MAX_TOKENS);
  let layer = Math.min(layers - 1, 2), head = 0, shown = false, newest = 0;
  const draw = async () => {
    const number = ++newest;
    const found = await attention(shownTokens.map((token) => token.id), layer, head);
    shown = true;
    if (number === newest) out.replaceChildren(...map(shownTokens, found));
  };
  const quietly = () => { if (shown) draw().catch((error) => out.replaceChildren(el("p", {class: "error", role: "alert"}, error.message))); };
  const upTo = (n) => Array.from({length: n}, (_, one) => one);
  return el("details", {class: "panel", "data-panel": "attention"}, el("summary", {}, "What each token looks at: attention"),
    el("p", {class: "note"}, "Each row is a token, each column the token itself or one before it. The stronger a cell, the more the row's token takes from the column's. These are the model's real numbers for your prompt",
      tokens.length > MAX_TOKENS ? ` (its first ${MAX_TOKENS} tokens)` : "", isRecorded ? "." : ", computed in a process of its own."),
    el("div", {class: "controls"},
      slider({name: "layer", label: "Layer", stops: upTo(layers), value: layer, onchange: (value) => { layer = value; quietly(); }}),
      slider({name: "head", label: "Head", stops: upTo(heads), value: head, onchange: (value) => { head = value; quietly(); }})),
    runButton("Show the attention", draw, {primary: false, name: "attention"}), out);
}

function map(tokens, found) {
  const cell = 12, side = cell * tokens.length, note = el("p", {class: "note", "aria-live": "polite"}, "Point at a cell, or read the strongest links to other tokens below (without the first token, which takes what is left over).");
  const cells = found.rows.flatMap((row, query) => row.map((share, key) => svg("rect", {
    x: key * cell, y: query * cell, width: cell - 1, height: cell - 1, class: "attended", "fill-opacity": Math.sqrt(share),
    "data-query": query, "data-key": key, "data-share": share,
    onmouseenter: () => { note.textContent = link(tokens, query, key, share); },
  })));
  const strongest = found.rows.flatMap((row, query) => row.map((share, key) => ({query, key, share})))
    .filter(({query, key}) => key !== query && key > 0).sort((a, b) => b.share - a.share).slice(0, 5);
  return [
    note,
    wide("Attention map", picture(`Attention of layer ${found.layer}, head ${found.head}, over ${tokens.length} tokens`, side, side, ...cells)),
    el("ul", {class: "plain"}, strongest.map(({query, key, share}) => el("li", {}, link(tokens, query, key, share)))),
  ];
}

const link = (tokens, query, key, share) =>
  `“${visible(tokens[query].text)}” (${query + 1}) takes ${percent(share)} from “${visible(tokens[key].text)}” (${key + 1})`;
