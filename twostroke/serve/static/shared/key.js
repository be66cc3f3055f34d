// The API key. It is stored for this tab, under the same name as in `/dash`; a dialog asks for it.
import {el} from "./dom.js";

const NAME = "twostroke-key";
let kept = null; // used if the browser forbids storage
let asking = null; // the promise of the open dialog

export function apiKey() {
  try {
    return sessionStorage.getItem(NAME) ?? kept ?? "";
  } catch {
    return kept ?? "";
  }
}

export function keepKey(key) {
  kept = key;
  try {
    sessionStorage.setItem(NAME, key);
  } catch { /* the key lasts as long as the page */ }
}

// Asks the user for a key; null if the user cancels. Simultaneous calls share one dialog.
export function askKey() {
  asking ??= openDialog(apiKey() !== "").finally(() => { asking = null; });
  return asking;
}

function openDialog(wrong) {
  const input = el("input", {id: "api-key", type: "password", autocomplete: "off", required: true});
  const form = el("form", {method: "dialog"},
    wrong && el("p", {class: "error", role: "alert"}, "The server does not know this key."),
    el("p", {class: "soft"}, "The server was started with --api-key. The key stays in this tab."),
    el("label", {for: "api-key"}, "API key"), input,
    el("div", {class: "row"},
      el("button", {type: "button", onclick: () => dialog.close()}, "Cancel"),
      el("button", {class: "primary", value: "use"}, "Use this key")));
  const dialog = el("dialog", {"aria-labelledby": "api-key-title"},
    el("h2", {id: "api-key-title"}, "This server needs an API key"), form);
  document.body.append(dialog);
  const before = document.activeElement;
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    let entered = null;
    form.addEventListener("submit", () => { entered = input.value.trim(); });
    dialog.addEventListener("close", () => {
      dialog.remove();
      before?.focus?.();
      if (entered) keepKey(entered);
      resolve(entered || null);
    });
  });
}
