// Small dialogs: a confirmation, a name, the list of keyboard shortcuts.
import {el} from "../shared/dom.js";

function open(title, nodes, buttons) {
  const dialog = el("dialog", {"aria-labelledby": "dialog-title"}, el("h2", {id: "dialog-title"}, title));
  const form = el("form", {method: "dialog"}, nodes, el("div", {class: "row"}, buttons));
  dialog.append(form);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

export async function confirmed(title, text, action) {
  const buttons = [el("button", {value: ""}, "Cancel"), el("button", {class: "primary", value: "yes"}, action)];
  return await open(title, [el("p", {}, text)], buttons) === "yes";
}

// Asks the user for a name; null if the user cancels.
export async function askName(title, label, value) {
  const input = el("input", {id: "name", value, maxlength: 200, required: true});
  const cancel = el("button", {value: "", formnovalidate: true}, "Cancel");
  // Enter in the field presses the first button that submits.
  const buttons = [el("button", {class: "primary", value: "yes"}, "Save"), cancel];
  const answered = open(title, [el("label", {for: "name"}, label), input], buttons);
  input.select();
  return await answered === "yes" ? input.value.trim() : null;
}

const KEYS = [
  ["Enter", "send the message"],
  ["Shift + Enter", "begin a new line"],
  ["Escape", "stop the answer"],
  ["↑ in an empty field", "edit your last message"],
  ["Alt + Shift + N", "begin a new chat"],
  ["Alt + Shift + S", "open the settings"],
  ["Tab, Shift + Tab", "go to the next or previous message or action"],
  ["← → Home End", "move in the list of tokens"],
];

export function showKeys() {
  const rows = KEYS.map(([key, text]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)]);
  return open("Keyboard shortcuts", [el("dl", {class: "keyboard"}, rows.flat())], [el("button", {class: "primary", value: ""}, "Close")]);
}
