// Elements from data. A text is always text: nothing here parses markup.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "selected"]);

// Properties that an element was made with. A later drawing changes the differences alone: what a visitor typed, opened
// or scrolled stays.
const given = new WeakMap();

// The element of the document that a drawn one became, and the one drawn last of each. A page that draws an element again
// without a change means what it became: its new children were moved there.
const became = new WeakMap();
const latest = new WeakMap();

// An HTML element. `properties`: attributes (null and false: absent), listeners (`onclick: function`), `key` (its
// identity among its siblings) and `keep` (true: later drawings leave its content alone).
export function h(tag, properties, ...children) {
  return build(document.createElement(tag), properties, children);
}

// An element of SVG.
export function s(tag, properties, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

function build(element, properties, children) {
  given.set(element, properties ?? {});
  element.append(...nodes(children));
  for (const [name, value] of Object.entries(properties ?? {})) assign(element, name, value);
  return element;
}

function assign(element, name, value) {
  if (name === "key" || name === "keep") return;
  if (name.startsWith("on") && (typeof value === "function" || value == null)) element[name] = value ?? null;
  else if (PROPERTIES.has(name)) element[name] = value ?? "";
  else if (value == null || value === false) element.removeAttribute(name);
  else element.setAttribute(name, value === true ? "" : String(value));
}

// Children as nodes: lists are flattened; null, undefined and false are left out.
function nodes(children) {
  return [children]
    .flat(Infinity)
    .filter((child) => child != null && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child))));
}

const keyOf = (node) => given.get(node)?.key;

// The element itself, or what it became where nothing else was drawn there since.
function inDocument(node) {
  const old = became.get(node);
  return old && latest.get(old) === node ? old : node;
}

// Make the content of `parent` equal to `children`, with the elements that are there already.
export function patch(parent, ...children) {
  const wanted = nodes(children).map(inDocument);
  const keys = new Set(wanted.map(keyOf));
  const keyed = new Map();
  for (const child of [...parent.childNodes]) {
    const key = keyOf(child);
    if (key === undefined) continue;
    if (keys.has(key)) keyed.set(key, child);
    else child.remove();
  }
  let place = parent.firstChild;
  for (const node of wanted) {
    const key = keyOf(node);
    const old = key === undefined ? place : keyed.get(key);
    if (old && keyOf(old) === key && alike(old, node)) {
      if (old === place) place = place.nextSibling;
      else parent.insertBefore(old, place);
      if (old !== node) update(old, node);
    } else {
      parent.insertBefore(node, place);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function alike(old, node) {
  return old.nodeType === node.nodeType && old.nodeName === node.nodeName;
}

function update(old, node) {
  if (node.nodeType === Node.TEXT_NODE) {
    if (old.nodeValue !== node.nodeValue) old.nodeValue = node.nodeValue;
    return;
  }
  became.set(node, old);
  latest.set(old, node);
  const before = given.get(old) ?? {};
  const now = given.get(node) ?? {};
  if (!now.keep) patch(old, ...node.childNodes);
  for (const name of Object.keys(before)) if (!(name in now)) assign(old, name, null);
  for (const [name, value] of Object.entries(now)) if (before[name] !== value) assign(old, name, value);
  given.set(old, now);
}
