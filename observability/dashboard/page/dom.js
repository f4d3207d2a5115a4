// Helpers for the page's elements. Text from a run is inserted only as text content, never as HTML.

export const byId = (id) => document.getElementById(id);

/** Create an element with text content, and optionally a class. */
export function element(kind, text = "", className = "") {
  const node = document.createElement(kind);
  node.textContent = text;
  if (className) node.className = className;
  return node;
}

/** Set an element's text, and hide the element if there is none. */
export function setText(id, text) {
  byId(id).hidden = !text;
  byId(id).textContent = text ?? "";
}

/** Return a legend entry: a patch of a colour or of a CSS class, and its text. */
export function key(look, text) {
  const label = element("span"), patch = element("i");
  if (look.startsWith(".")) patch.className = look.slice(1);
  else patch.style.background = look;
  label.append(patch, text);
  return label;
}

/** Return a description list's children for [[name, value], …]. */
export const facts = (pairs) =>
  pairs.flatMap(([name, value]) => [element("dt", name), element("dd", String(value))]);

/** Fetch JSON from the dashboard's API; throw the server's message if it refuses. */
export async function fetchJson(path) {
  const response = await fetch(path);
  const body = await response.json();
  if (!response.ok) throw new Error(body.error);
  return body;
}
