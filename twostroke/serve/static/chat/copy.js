// A button that copies text. Without TLS a browser has no `navigator.clipboard`: then the text is
// copied by a selection.
import {announce, el} from "../shared/dom.js";

export function copyButton(textOf, label = "Copy", more = {}) {
  const button = el("button", {type: "button", class: "quiet small-button", "aria-label": label, ...more}, "Copy");
  button.addEventListener("click", async () => {
    const copied = await copy(textOf());
    button.textContent = copied ? "Copied" : "Not copied";
    announce(copied ? "Copied" : "The browser does not allow copying");
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text);
  }
}

function copyBySelection(text) {
  const area = el("textarea", {class: "sr", "aria-hidden": "true"});
  const before = document.activeElement;
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  try {
    return document.execCommand("copy");
  } finally {
    area.remove();
    before?.focus?.();
  }
}
