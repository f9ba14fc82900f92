// Markdown as elements: blocks, lists, tables, code, emphasis and links. A text never becomes markup: tags stay text,
// pictures are links, and only addresses of http, https and mailto are followed. The time grows with the text alone:
// a mark without an end is looked for once.

import { copyButton } from "./clipboard.js";
import { h } from "./dom.js";

const LONGEST = 200_000;
const DEEPEST = 6;
const LONGEST_LABEL = 1_000;
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const ADDRESS = /^(?:https?:\/\/|mailto:)[^\s<>"]+$/i;
const BARE = /https?:\/\/[^\s<>"`]+/iy;
const WORD = /[\p{L}\p{N}_]/u;
const ESCAPED = /[!-/:-@[-`{-~]/;

// The blocks of a text; one that is too long is shown as it is.
export function markdown(text) {
  if (text.length > LONGEST) return [h("p", {}, text)];
  return blocks(text.split(/\r?\n/), 0);
}

function blocks(lines, depth) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    const [element, next] = block(lines, at, depth);
    if (element) found.push(element);
    at = next;
  }
  return found;
}

// The block that begins at a line, null for an empty one, and the line behind it.
function block(lines, at, depth) {
  const line = lines[at];
  if (!line.trim()) return [null, at + 1];
  const fence = FENCE.exec(line);
  if (fence) return fenced(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2].replace(/[ \t]+#+[ \t]*$/, ""))), at + 1];
  if (RULE.test(line)) return [h("hr", {}), at + 1];
  if (depth < DEEPEST && QUOTE.test(line)) return quoted(lines, at, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listed(lines, at, depth);
  if (isTable(lines, at)) return tabled(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines, end, depth)) end++;
  return [h("p", {}, inline(lines.slice(at, end).join("\n"))), end];
}

function begins(lines, at, depth) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || isTable(lines, at)) return true;
  return depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line));
}

function fenced(lines, at, [, mark, language]) {
  let end = at + 1;
  const closes = (line) => line.trim().length >= mark.length && line.trim().split(mark[0]).join("") === "";
  while (end < lines.length && !closes(lines[end])) end++;
  return [code(lines.slice(at + 1, end).join("\n"), language), end + 1];
}

function code(text, language) {
  const head = h("div", { class: "code-head" }, h("span", {}, language || "code"), copyButton("Copy code", () => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: 0, "aria-label": `Code${language ? ` in ${language}` : ""}`, role: "region", dir: "ltr" }, h("code", {}, text)));
}

function quoted(lines, at, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return [h("blockquote", {}, blocks(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1)), end];
}

const indentOf = (line) => /^[ \t]*/.exec(line)[0].length;

// The items of one list: lines that are indented more than its mark belong to an item.
function listed(lines, at, depth) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const deeper = indentOf(line) > indent.length;
    if (item && item[1].length <= indent.length && /\d/.test(item[2]) === ordered && !RULE.test(line)) items.push([line.slice(item[0].length)]);
    else if (!items.length || (!deeper && line.trim()) || (!line.trim() && !continues(lines, end, indent.length))) break;
    else items.at(-1).push(line.slice(Math.min(indentOf(line), indent.length + mark.length + 1)));
    end++;
  }
  const content = items.map((item) => h("li", {}, tight(blocks(item, depth + 1))));
  return [ordered ? h("ol", { start: Number.parseInt(mark, 10) }, content) : h("ul", {}, content), end];
}

// True if the list goes on behind this empty line.
function continues(lines, at, indent) {
  const next = lines.slice(at, at + 3).find((line) => line.trim());
  return next !== undefined && (indentOf(next) > indent || (indentOf(next) === indent && ITEM.test(next)));
}

// An item of one paragraph has no element for it.
function tight(content) {
  return content[0]?.nodeName === "P" && content.slice(1).every((one) => one.nodeName !== "P") ? [...content[0].childNodes, ...content.slice(1)] : content;
}

const cellsOf = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

function isTable(lines, at) {
  const next = lines[at + 1] ?? "";
  return lines[at].includes("|") && next.includes("-") && next.includes("|") && cellsOf(next).every((cell) => /^:?-+:?$/.test(cell));
}

function tabled(lines, at) {
  const names = cellsOf(lines[at]);
  let end = at + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) end++;
  const rows = lines.slice(at + 2, end).map((line) => cellsOf(line).slice(0, names.length));
  const drawn = h("table", {},
    h("thead", {}, h("tr", {}, names.map((name) => h("th", { scope: "col" }, inline(name))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, place) => h("td", { "data-name": names[place] }, inline(cell)))))));
  return [h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table" }, drawn), end];
}

// A text with emphasis, code and links.
function inline(text, depth = 0) {
  const found = [];
  const missing = new Set();
  let plain = "";
  const add = (node) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
  };
  for (let at = 0; at < text.length; ) {
    const part = special(text, at, depth, missing);
    if (part) add(part.node);
    if (part) at = part.end;
    else if (text[at] === "\\" && ESCAPED.test(text[at + 1] ?? "")) [plain, at] = [plain + text[at + 1], at + 2];
    else [plain, at] = [plain + text[at], at + 1];
  }
  if (plain) found.push(plain);
  return found;
}

// What begins at a place of a text, `{node, end}`; null for a character that means itself. `missing`: marks that have no
// end in the rest of the text.
function special(text, at, depth, missing) {
  const char = text[at];
  if (char === "`") return codeAt(text, at, missing);
  if (char === "[" || (char === "!" && text[at + 1] === "[")) return linkAt(text, at, depth, missing);
  if ((char === "h" || char === "H") && !WORD.test(text[at - 1] ?? "")) return bareAt(text, at);
  if (!"*_~".includes(char) || depth >= DEEPEST) return null;
  const mark = text[at + 1] === char ? char + char : char;
  return mark === "~" ? null : emphasisAt(text, at, mark, depth, missing);
}

function codeAt(text, at, missing) {
  let size = 1;
  while (text[at + size] === "`") size++;
  const mark = "`".repeat(size);
  if (!missing.has(mark)) {
    for (let end = text.indexOf(mark, at + size); end >= 0; end = text.indexOf(mark, end + size)) {
      let run = size;
      while (text[end + run] === "`") run++;
      if (run === size) return { node: h("code", {}, text.slice(at + size, end).replace(/^ (.*\S.*) $/s, "$1")), end: end + size };
      end += run - size;
    }
    missing.add(mark);
  }
  return { node: mark, end: at + size };
}

const TAGS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

function emphasisAt(text, at, mark, depth, missing) {
  const begin = at + mark.length;
  if (missing.has(mark) || /\s/.test(text[begin] ?? " ")) return { node: mark, end: begin };
  if (mark[0] === "_" && WORD.test(text[at - 1] ?? "")) return { node: mark, end: begin };
  for (let end = text.indexOf(mark, begin + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) continue;
    if (mark[0] === "_" && WORD.test(text[end + mark.length] ?? "")) continue;
    return { node: h(TAGS[mark], {}, inline(text.slice(begin, end), depth + 1)), end: end + mark.length };
  }
  missing.add(mark);
  return { node: mark, end: begin };
}

function linkAt(text, at, depth, missing) {
  const begin = at + (text[at] === "!" ? 2 : 1);
  const middle = missing.has("[") ? -1 : text.indexOf("](", begin);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0) missing.add("[");
  if (end < 0 || middle - begin > LONGEST_LABEL) return null;
  const [address] = text.slice(middle + 2, end).trim().split(/\s/);
  const label = text.slice(begin, middle);
  if (!ADDRESS.test(address ?? "") || label.includes("[")) return null;
  return { node: anchor(address, label ? (depth < DEEPEST ? inline(label, DEEPEST) : label) : address), end: end + 1 };
}

function bareAt(text, at) {
  BARE.lastIndex = at;
  const address = BARE.exec(text)?.[0].replace(/[.,;:!?)\]}'*_~]+$/, "");
  return address && ADDRESS.test(address) ? { node: anchor(address, address), end: at + address.length } : null;
}

function anchor(address, content) {
  return h("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}
