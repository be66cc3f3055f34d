// Functions that build elements. Text always becomes a text node and is never parsed as HTML.

// Creates an element: el("button", {class: "quiet", onclick: copy, "aria-label": "Copy"}, "Copy")
// A property that is null, undefined or false is left out; `true` becomes an empty attribute.
export function el(name, properties = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "dataset") Object.assign(node.dataset, value);
    else if (key === "value" || key === "checked") node[key] = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const byId = (id) => document.getElementById(id);

// Announces `text` to a screen reader, without moving the focus. `id`: an element with aria-live.
export function announce(text, id = "announcer") {
  const node = byId(id);
  if (!node) return;
  node.textContent = "";
  requestAnimationFrame(() => { node.textContent = text; });
}
