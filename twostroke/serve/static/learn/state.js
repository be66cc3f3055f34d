// The page's state is in its URL: #/lesson/2/1?prompt=512. A link shows what its sender saw.

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

// Change parameters of the URL without a new entry in the history, and without redrawing.
export function keep(values) {
  const {path, values: given} = current();
  for (const [name, value] of Object.entries(values)) given.set(name, value);
  history.replaceState(null, "", linkTo(path.join("/"), given));
}

// A parameter of the URL.
export const numberParam = (name, otherwise) => {
  const value = Number(current().values.get(name) ?? NaN);
  return Number.isFinite(value) ? value : otherwise;
};

export const textParam = (name, otherwise) => current().values.get(name) ?? otherwise;

export function onChange(listener) {
  listeners.push(listener);
  addEventListener("hashchange", listener);
}
