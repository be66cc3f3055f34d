// Shows Markdown as DOM nodes. The text is a model's, so it is never parsed as HTML: every character
// becomes part of a text node, this module alone creates the elements, and links lead only to http,
// https and mailto. An image is shown as a link, because the page loads nothing from other hosts.
import {copyButton} from "./copy.js";
import {el} from "../shared/dom.js";

const MAX_DEPTH = 12; // of nested quotes, lists and emphasis; deeper ones stay text
const MAX_ADDRESS = 2000; // characters of a link's address
const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const ITEM = /^( {0,8})([-*+]|\d{1,9}[.)])(?: +|$)/;
const QUOTE = /^ {0,3}> ?/;

// Shows `text` in `container`. Called again with a longer text, it keeps the blocks that have not
// changed. So an update of a stream redraws only the last block, and a selection in other blocks stays.
export function showMarkdown(container, text) {
  const sources = blocksOf(text.split("\n"));
  const shown = container.blockSources ?? [];
  let same = 0;
  while (same < sources.length && same < shown.length && sources[same] === shown[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const source of sources.slice(same)) container.append(block(source.split("\n"), 0));
  container.blockSources = sources;
}

// ── blocks ──────────────────────────────────────────────────────────────────────────────────

// Returns the source of each block.
function blocksOf(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = endOfBlock(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

function endOfBlock(lines, at) {
  const first = lines[at];
  const fence = FENCE.exec(first);
  if (fence) return endOfFence(lines, at, fence[1]);
  if (RULE.test(first) || HEADING.test(first)) return at + 1;
  if (QUOTE.test(first)) return endWhile(lines, at + 1, (line) => QUOTE.test(line) || (line.trim() && !startsBlock(line)));
  if (ITEM.test(first)) return endOfList(lines, at);
  if (isTable(lines, at)) return endWhile(lines, at + 2, (line) => line.includes("|"));
  return endWhile(lines, at + 1, (line, n) => line.trim() && !startsBlock(line) && !isTable(lines, n));
}

function endWhile(lines, at, belongs) {
  while (at < lines.length && belongs(lines[at], at)) at += 1;
  return at;
}

function endOfFence(lines, at, fence) {
  const closes = (line) => {
    const text = line.trim();
    return text.length >= fence.length && text === fence[0].repeat(text.length);
  };
  return Math.min(lines.length, endWhile(lines, at + 1, (line) => !closes(line)) + 1);
}

function endOfList(lines, at) {
  const [, indent, marker] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(marker);
  let end = at + 1;
  for (let n = at + 1; n < lines.length; n += 1) {
    const line = lines[n];
    const item = ITEM.exec(line);
    if (!line.trim()) continue; // a blank line belongs to the list if more of the list follows
    const afterBlank = !lines[n - 1].trim();
    const belongs = indentOf(line) > indent.length
      || (item && /\d/.test(item[2]) === ordered && !RULE.test(line))
      || (!item && !afterBlank && !startsBlock(line));
    if (!belongs) break;
    end = n + 1;
  }
  return end;
}

const indentOf = (line) => line.length - line.trimStart().length;
const startsBlock = (line) => FENCE.test(line) || RULE.test(line) || HEADING.test(line)
  || QUOTE.test(line) || ITEM.test(line);

function isTable(lines, at) {
  if (!lines[at]?.includes("|") || !lines[at + 1]?.includes("-")) return false;
  const marks = cells(lines[at + 1]);
  return marks.length === cells(lines[at]).length && marks.every((mark) => /^:?-+:?$/.test(mark));
}

function block(lines, depth) {
  const first = lines[0];
  const fence = FENCE.exec(first);
  if (fence) return codeBlock(lines, fence);
  if (RULE.test(first)) return el("hr");
  const heading = HEADING.exec(first);
  if (heading) return headingBlock(heading, depth);
  if (depth < MAX_DEPTH && QUOTE.test(first)) {
    return el("blockquote", {}, blockNodes(lines.map((line) => line.replace(QUOTE, "")), depth + 1));
  }
  if (depth < MAX_DEPTH && ITEM.test(first)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return el("p", {}, inline(lines.map((line) => line.trimStart()).join("\n"), 0));
}

const blockNodes = (lines, depth) =>
  blocksOf(lines).map((source) => block(source.split("\n"), depth));

function headingBlock([, marks, text = ""]) {
  // h1 is the page's title, and h2 the title of each message.
  const name = `h${Math.min(6, marks.length + 2)}`;
  return el(name, {}, inline(text.trim().replace(/ #+$/, ""), 0));
}

function codeBlock(lines, [, fence, info]) {
  const last = lines.length > 1 ? lines.at(-1).trim() : "";
  const closed = last.length >= fence.length && last === fence[0].repeat(last.length);
  const text = lines.slice(1, closed ? -1 : undefined).join("\n");
  const language = info.trim().split(/\s/)[0];
  const label = language ? `Code, ${language}` : "Code";
  return el("div", {class: "code"},
    el("div", {class: "code-bar"}, el("span", {}, language || "text"), copyButton(() => text, "Copy code")),
    el("pre", {tabindex: "0", role: "region", "aria-label": label}, el("code", {}, text)));
}

function list(lines, depth) {
  const [, , marker] = ITEM.exec(lines[0]);
  const ordered = /\d/.test(marker);
  const items = [];
  let content = 0; // the column at which the item's text begins
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && (items.length === 0 || item[1].length < content)) {
      content = item[0].length === line.length ? item[1].length + item[2].length + 1 : item[0].length;
      items.push([line.slice(item[0].length)]);
    } else {
      items.at(-1).push(line.slice(Math.min(indentOf(line), content)));
    }
  }
  const start = ordered && Number.parseInt(marker, 10) !== 1 ? Number.parseInt(marker, 10) : null;
  return el(ordered ? "ol" : "ul", {start}, items.map((one) => listItem(one, depth + 1)));
}

function listItem(lines, depth) {
  const task = /^\[([ xX])\] /.exec(lines[0]);
  if (task) lines = [lines[0].slice(4), ...lines.slice(1)];
  const nodes = blockNodes(lines, depth);
  // Without blank lines, an item has its text directly, not in a paragraph.
  if (nodes[0]?.tagName === "P" && !lines.some((line) => !line.trim())) {
    nodes.splice(0, 1, ...nodes[0].childNodes);
  }
  const done = task && task[1] !== " ";
  return el("li", {class: task ? "task" : null},
    task && el("span", {role: "img", "aria-label": done ? "done" : "not done"}, done ? "☑ " : "☐ "), nodes);
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(lines) {
  const [head, marks, ...rows] = lines.map(cells);
  const align = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : null));
  const cell = (name, text, n) => el(name, {class: align[n] && `to-${align[n]}`}, inline(text ?? "", 0));
  return el("div", {class: "table", tabindex: "0", role: "region", "aria-label": "Table"},
    el("table", {},
      el("thead", {}, el("tr", {}, head.map((text, n) => cell("th", text, n)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, head.map((_, n) => cell("td", row[n], n)))))));
}

// ── inline ──────────────────────────────────────────────────────────────────────────────────

function inline(text, depth) {
  const nodes = [];
  const missing = new Set(); // marks without a closing mark in the rest of the text
  let plain = "";
  const add = (node) => {
    if (plain) nodes.push(plain);
    plain = "";
    nodes.push(node);
  };
  for (let at = 0; at < text.length;) {
    const found = depth < MAX_DEPTH ? element(text, at, depth, missing) : null;
    if (found) {
      add(found.node);
      at = found.end;
    } else if (text[at] === "\\" && PUNCTUATION.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  if (plain) nodes.push(plain);
  return nodes;
}

// Returns the element that begins at `at`, and the position after it; null if no element begins here.
function element(text, at, depth, missing) {
  switch (text[at]) {
    case "\n": return {node: el("br"), end: at + 1};
    case "`": return codeSpan(text, at, missing);
    case "*": case "_": return emphasis(text, at, depth, missing);
    case "~": return text[at + 1] === "~" ? enclosed(text, at, "~~", "del", depth, missing) : null;
    case "[": return link(text, at, depth, missing);
    case "!": return text[at + 1] === "[" ? link(text, at + 1, depth, missing) : null;
    case "<": return angleLink(text, at);
    case "h": return bareLink(text, at);
    default: return null;
  }
}

function codeSpan(text, at, missing) {
  let end = at;
  while (text[end] === "`") end += 1;
  const mark = text.slice(at, end);
  if (missing.has(mark)) return {node: mark, end};
  let close = text.indexOf(mark, end);
  while (close >= 0 && (text[close - 1] === "`" || text[close + mark.length] === "`")) {
    while (text[close] === "`") close += 1;
    close = text.indexOf(mark, close);
  }
  if (close < 0) {
    missing.add(mark);
    return {node: mark, end};
  }
  const code = text.slice(end, close).replaceAll("\n", " ");
  const padded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
  return {node: el("code", {}, padded ? code.slice(1, -1) : code), end: close + mark.length};
}

function emphasis(text, at, depth, missing) {
  const mark = text[at];
  if (mark === "_" && WORD.test(text[at - 1] ?? "")) return null;
  const strong = text[at + 1] === mark ? enclosed(text, at, mark + mark, "strong", depth, missing) : null;
  return strong ?? enclosed(text, at, mark, "em", depth, missing);
}

function enclosed(text, at, mark, name, depth, missing) {
  const begin = at + mark.length;
  if (missing.has(mark) || !text[begin] || /\s/.test(text[begin])) return null;
  const letter = mark[0];
  for (let end = text.indexOf(mark, begin + 1); end >= 0; end = text.indexOf(mark, end + 1)) {
    if (/\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    let after = end + mark.length;
    if (mark.length === 1 && (text[after] === letter || text[end - 1] === letter)) continue;
    while (mark.length === 2 && text[after] === letter) { // **bold *and italic***
      end += 1;
      after += 1;
    }
    if (letter === "_" && WORD.test(text[after] ?? "")) continue;
    return {node: el(name, {}, inline(text.slice(begin, end), depth + 1)), end: after};
  }
  missing.add(mark);
  return null;
}

function link(text, at, depth, missing) {
  if (missing.has("](")) return null;
  const middle = text.indexOf("](", at);
  if (middle < 0) {
    missing.add("](");
    return null;
  }
  const label = text.slice(at + 1, middle);
  if (label.length > 1000 || /(?<!\\)[[\]]/.test(label.replace(/^!?\[[^[\]]*\]\([^()]*$/, ""))) return null;
  let open = 1;
  let end = middle + 2;
  const last = Math.min(text.length, end + MAX_ADDRESS);
  while (end < last && open > 0 && text[end] !== "\n") {
    if (text[end] === "(") open += 1;
    if (text[end] === ")") open -= 1;
    end += 1;
  }
  if (open > 0) {
    if (!text.includes(")", middle)) missing.add("](");
    return null;
  }
  const target = text.slice(middle + 2, end - 1).trim().replace(/\s+["'(].*$/, "").replace(/^<(.*)>$/, "$1");
  const href = safeAddress(target);
  if (href === null) return null;
  const shown = inline(label, depth + 1);
  return {node: anchor(href, shown.length ? shown : [target]), end};
}

function angleLink(text, at) {
  const match = /^<(https?:\/\/[^\s<>]{1,2000})>/.exec(text.slice(at, at + 2010));
  const href = match && safeAddress(match[1]);
  return href ? {node: anchor(href, [match[1]]), end: at + match[0].length} : null;
}

function bareLink(text, at) {
  if (WORD.test(text[at - 1] ?? "")) return null;
  const match = /^https?:\/\/[^\s<>"'`]{1,2000}/.exec(text.slice(at, at + 2010));
  const address = match?.[0].replace(/[.,;:!?*_~\])]+$/, "");
  const href = address && safeAddress(address);
  return href ? {node: anchor(href, [address]), end: at + address.length} : null;
}

function safeAddress(target) {
  try {
    const url = new URL(target); // without a base, so a relative address is refused
    return SCHEMES.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

const anchor = (href, nodes) =>
  el("a", {href, target: "_blank", rel: "noopener noreferrer nofollow"}, nodes);
