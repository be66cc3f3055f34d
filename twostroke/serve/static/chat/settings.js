// The dialog for the settings of a conversation: system prompt, sampling, tools.
import {el} from "../shared/dom.js";

const NAME = "twostroke-chat-settings";
const SAMPLING = [ // request field, label, step, minimum, maximum
  ["temperature", "Temperature", "0.05", 0, 2],
  ["top_p", "Top-p", "0.01", 0, 1],
  ["top_k", "Top-k (0: all)", "1", 0, null],
  ["min_p", "Min-p", "0.01", 0, 1],
  ["max_tokens", "Longest answer", "1", 1, null],
  ["seed", "Seed", "1", 0, null],
  ["repetition_penalty", "Repetition penalty", "0.05", 0.05, 5],
  ["presence_penalty", "Presence penalty", "0.1", -2, 2],
  ["frequency_penalty", "Frequency penalty", "0.1", -2, 2],
];

// Returns the settings that were saved last. A new conversation begins with them.
export function lastSettings() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME));
    if (found && typeof found === "object") return found;
  } catch { /* storage is switched off, or has other data */ }
  return {system: "", sampling: {}, tools: "", more: "", details: true};
}

function keepSettings(settings) {
  try {
    localStorage.setItem(NAME, JSON.stringify(settings));
  } catch { /* the next conversation begins with the server's settings */ }
}

// Opens the dialog. Returns the saved settings; null if the user cancels.
// `defaults`: the server's settings from `/props`, with llama.cpp's names.
export function editSettings(settings, defaults) {
  const problem = el("p", {class: "error", role: "alert", hidden: true});
  const field = (id, label, input) => el("div", {class: "field"}, el("label", {for: id}, label), input);
  const area = (id, label, value, rows, hint) => field(id, label,
    el("textarea", {id, rows, value, placeholder: hint, spellcheck: "false"}));
  const numbers = SAMPLING.map(([name, label, step, min, max]) => field(`set-${name}`, label, el("input", {
    id: `set-${name}`, type: "number", step: name === "temperature" ? "any" : step === "1" ? "1" : "any", min, max,
    value: settings.sampling?.[name] ?? "", placeholder: placeholderOf(defaults, name),
  })));
  const form = el("form", {method: "dialog"},
    area("set-system", "System prompt", settings.system ?? "", 4, "Instructions for the model, before the conversation"),
    el("fieldset", {}, el("legend", {}, "Sampling (empty: the server's default)"), el("div", {class: "grid"}, numbers)),
    el("div", {class: "check"},
      el("input", {id: "set-details", type: "checkbox", checked: settings.details !== false}),
      el("label", {for: "set-details"}, "Request log-probabilities and gaps of each token")),
    el("details", {open: Boolean(settings.tools || settings.more)}, el("summary", {}, "Tools and other fields"),
      area("set-tools", "Tools: a JSON list, in the format of the API", settings.tools ?? "", 5,
        '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]'),
      area("set-more", "Other fields of the request: a JSON object", settings.more ?? "", 2, '{"min_tokens": 20}')),
    problem,
    el("div", {class: "row"},
      el("button", {type: "button", onclick: () => dialog.close()}, "Cancel"),
      el("button", {class: "primary", value: "save"}, "Save")));
  const dialog = el("dialog", {class: "settings", "aria-labelledby": "settings-title"},
    el("h2", {id: "settings-title"}, "Settings of this conversation"), form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    let saved = null;
    form.addEventListener("submit", (event) => {
      try {
        saved = readForm(form);
        keepSettings(saved);
      } catch (error) {
        event.preventDefault();
        problem.textContent = error.message;
        problem.hidden = false;
      }
    });
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(saved);
    });
  });
}

function readForm(form) {
  const value = (name) => form.querySelector(`#set-${name}`).value;
  const sampling = {};
  for (const [name] of SAMPLING) {
    if (value(name) !== "") sampling[name] = Number(value(name));
  }
  const tools = value("tools");
  const more = value("more");
  if (tools.trim() && !Array.isArray(parsed(tools, "Tools"))) throw new Error("Tools: expected a JSON list, which begins with [.");
  const other = more.trim() ? parsed(more, "Other fields") : {};
  if (other === null || typeof other !== "object" || Array.isArray(other)) {
    throw new Error("Other fields: expected a JSON object, which begins with {.");
  }
  const details = form.querySelector("#set-details").checked;
  return {system: value("system"), sampling, tools, more, details};
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: this is not JSON (${error.message}).`);
  }
}

const LLAMA_NAMES = {repetition_penalty: "repeat_penalty"};

function placeholderOf(defaults, name) {
  const value = defaults?.[LLAMA_NAMES[name] ?? name];
  if (value === undefined || value === null || value === -1) return name === "seed" ? "random" : "no limit";
  return String(Math.round(value * 1000) / 1000);
}
