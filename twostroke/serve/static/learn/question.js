// A question: the reader chooses an option, and a run on the engine shows the answer.
import {announce, el} from "../shared/dom.js";
import {newId, runButton} from "./widgets.js";

// {name, text, options: [{text, why}], right, measure: async () => ({agrees, result})}
// `why`: why this option is wrong, or right. `measure` runs the experiment; `result` describes the
// outcome, and `agrees` is whether the outcome confirms the right option.
export function question({name, text, options, right, measure, ask = "Check with the engine"}) {
  const group = newId(name);
  const answer = el("div", {class: "stack", "data-part": "answer"});
  let chosen = null;
  const choices = options.map((option, n) => {
    const id = newId("option");
    const input = el("input", {type: "radio", id, name: group, value: n, onchange: () => { chosen = n; answer.replaceChildren(); }});
    return el("div", {class: "option", "data-option": n}, input, el("label", {for: id}, option.text));
  });
  const field = el("fieldset", {class: "question", "data-question": name}, el("legend", {}, text), choices,
    runButton(ask, async () => {
      if (chosen === null) throw new Error("Choose an answer first: a guess is enough.");
      const {agrees, result} = await measure();
      const correct = chosen === right;
      field.dataset.answered = correct ? "right" : "wrong";
      choices.forEach((one, n) => one.classList.toggle("right", n === right));
      answer.replaceChildren(
        el("p", {class: `verdict ${correct ? "right" : "wrong"}`}, el("strong", {}, correct ? "Right. " : "Not quite. "), options[chosen].why),
        correct ? "" : el("p", {}, el("strong", {}, `${options[right].text}: `), options[right].why),
        el("p", {class: "sentence", "data-agrees": String(agrees)}, result,
          agrees ? "" : " This run does not show it clearly: the machine had other work. Run it again."));
      announce(`${correct ? "Right" : "Not quite"}. ${options[chosen].why} ${result}`);
    }, {name: "answer"}), answer);
  return field;
}
