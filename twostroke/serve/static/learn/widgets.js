// Controls and elements that several views use.
import {announce, el} from "../shared/dom.js";
import {keep} from "./state.js";

let ids = 0;
export const newId = (name) => `${name}-${++ids}`;

// A slider over a list of values. `show` formats a value, `onchange` gets the new value. The URL keeps
// the value under `name`.
export function slider({name, label, stops, value, show = String, onchange}) {
  const id = newId(name);
  const at = nearest(stops, value);
  const output = el("output", {for: id}, show(stops[at]));
  const input = el("input", {
    id, type: "range", min: 0, max: stops.length - 1, step: 1, value: at, "data-name": name,
    "aria-valuetext": show(stops[at]),
    oninput: () => {
      const now = stops[Number(input.value)];
      output.textContent = show(now);
      input.setAttribute("aria-valuetext", show(now));
      keep({[name]: now});
      onchange(now);
    },
  });
  return el("div", {class: "control"}, el("label", {for: id}, label), output, input);
}

export function nearest(stops, value) {
  let best = 0;
  stops.forEach((one, n) => { if (Math.abs(one - value) < Math.abs(stops[best] - value)) best = n; });
  return best;
}

// A list from which the reader selects an option.
export function choice({name, label, options, value, onchange}) {
  const id = newId(name);
  const select = el("select", {id, "data-name": name, onchange: () => { keep({[name]: select.value}); onchange(select.value); }},
    options.map((one) => el("option", {value: one, selected: one === value}, one)));
  return el("div", {class: "control"}, el("label", {for: id}, label), select);
}

// A button for work that takes a while. It shows an error of the work, and keeps the focus.
export function runButton(text, work, {primary = true, name = "run"} = {}) {
  const problem = el("p", {class: "error", role: "alert", hidden: true});
  const button = el("button", {type: "button", class: primary ? "primary" : null, "data-run": name});
  button.append(text);
  button.addEventListener("click", async () => {
    if (button.getAttribute("aria-busy") === "true") return;
    button.setAttribute("aria-busy", "true");
    button.textContent = "Running on the engine…";
    announce("Running on the engine");
    problem.hidden = true;
    try {
      await work();
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    } finally {
      button.removeAttribute("aria-busy");
      button.textContent = text;
    }
  });
  return el("div", {class: "running"}, button, problem);
}

// A figure with its name: the large numbers of a screen.
export const fact = (name, value, note, className = "") =>
  el("div", {class: `fact ${className}`}, el("dt", {}, name), el("dd", {}, value, note && el("small", {}, note)));

// One line of a formula: its name, its numbers, its result.
export const formula = (name, numbers, result, className = "") =>
  el("tr", {class: className}, el("th", {scope: "row"}, name), el("td", {}, numbers), el("td", {class: "result"}, result));

export const legend = (...entries) =>
  el("ul", {class: "legend"}, entries.map(([kind, text]) => el("li", {}, el("i", {class: `key ${kind}`}), text)));

export const paragraphs = (texts) => texts.map((text) => el("p", {}, text));

// A container for a picture that may be wider than the screen: it scrolls, also with the keyboard.
export const wide = (label, ...children) =>
  el("div", {class: "wide", tabindex: 0, role: "group", "aria-label": label}, ...children);

// A table of figures in such a container. `columns`: the headings; "" for a column of bars.
export const table = (label, columns, rows, {className = "figures"} = {}) =>
  el("div", {class: "scroll", tabindex: 0, role: "group", "aria-label": label}, el("table", {class: className},
    el("caption", {}, label),
    el("thead", {}, el("tr", {}, columns.map((text) => text ? el("th", {scope: "col"}, text) : el("td", {})))),
    el("tbody", {}, rows)));
