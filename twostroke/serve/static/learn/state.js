// The state of the page is in its URL, such as #/lesson/2/1?prompt=512, so that links include it.

const listeners = [];

export function current() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return {path: path.split("/").filter(Boolean), values: new URLSearchParams(query)};
}

export const linkTo = (path, values = {}) => {
  const query = new URLSearchParams(values).toString();
  return `#/${path}${query ? `?${query}` : ""}`;
};

export function go(path, values) {
  location.hash = linkTo(path, values);
}

// Changes parameters of the URL without a new entry in the history, and without redrawing.
export function keep(values) {
  const {path, values: given} = current();
  for (const [name, value] of Object.entries(values)) given.set(name, value);
  history.replaceState(null, "", linkTo(path.join("/"), given));
}

// Return a parameter of the URL.
export const numberParam = (name, otherwise) => {
  const value = Number(current().values.get(name) ?? NaN);
  return Number.isFinite(value) ? value : otherwise;
};

export const textParam = (name, otherwise) => current().values.get(name) ?? otherwise;

export function onChange(listener) {
  listeners.push(listener);
  addEventListener("hashchange", listener);
}
