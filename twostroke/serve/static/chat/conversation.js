// A conversation is a tree of messages: editing a message, or regenerating an answer, adds a branch.
//
//   {id, title, created, updated, settings, nodes: {id: node}, leaf: id of the last shown message}
//   node: {id, parent, role, content, created, …}; of an assistant also reasoning, toolCalls, answer

const VERSION = 1;
const FORMAT = "twostroke-chat";
const ROLES = new Set(["user", "assistant", "tool"]);
const TITLE_LENGTH = 60;
export const UNTITLED = "New chat";

export function newConversation(settings) {
  const now = Date.now();
  return {id: newId(), title: UNTITLED, created: now, updated: now, settings: {...settings}, nodes: {}, leaf: null};
}

export function addNode(conversation, parent, role, fields) {
  const node = {id: newId(), parent, role, created: Date.now(), content: "", ...fields};
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  if (role === "user" && conversation.title === UNTITLED) conversation.title = titleOf(node.content);
  return node;
}

// Returns the shown messages, from the first to the leaf.
export function pathOf(conversation, leaf = conversation.leaf) {
  const path = [];
  for (let node = conversation.nodes[leaf]; node; node = conversation.nodes[node.parent]) path.push(node);
  return path.reverse();
}

// Returns all versions of a message, including the message itself, oldest first.
export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent && other.role === node.role)
    .sort((a, b) => a.created - b.created);
}

// Sets the leaf to the newest message below `node`.
export function showBranch(conversation, node) {
  let leaf = node;
  for (;;) {
    const children = Object.values(conversation.nodes).filter((other) => other.parent === leaf.id);
    if (!children.length) break;
    leaf = children.reduce((a, b) => (b.created >= a.created ? b : a));
  }
  conversation.leaf = leaf.id;
}

// Returns the messages in the format of the API.
export function apiMessages(conversation, path) {
  const system = conversation.settings.system?.trim();
  return [...(system ? [{role: "system", content: system}] : []), ...path.map(apiMessage)];
}

function apiMessage(node) {
  if (node.role === "tool") return {role: "tool", tool_call_id: node.toolCallId, content: node.content};
  if (node.role === "user" && node.images?.length) {
    const images = node.images.map((url) => ({type: "image_url", image_url: {url}}));
    return {role: "user", content: [{type: "text", text: node.content}, ...images]};
  }
  const message = {role: node.role, content: node.content};
  if (node.toolCalls?.length) {
    message.tool_calls = node.toolCalls.map(({id, name, arguments: given}) =>
      ({id, type: "function", function: {name, arguments: given}}));
  }
  return message;
}

const titleOf = (text) => {
  const line = text.trim().split("\n")[0];
  return (line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line) || UNTITLED;
};

function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(9));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// ── files ───────────────────────────────────────────────────────────────────────────────────

export const exported = (conversations) =>
  JSON.stringify({format: FORMAT, version: VERSION, exported: new Date().toISOString(), conversations}, null, 1);

// Returns the conversations of an exported file, with new ids. Throws an Error whose message the
// page shows.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON. Choose a file that this page has exported.");
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file is not an export of this page. Choose a file that this page has exported.");
  }
  if (file.version !== VERSION) {
    throw new Error(`This file has version ${file.version}, and this page reads version ${VERSION}.`);
  }
  return file.conversations.map(readConversation);
}

function readConversation(given) {
  const conversation = newConversation(isObject(given?.settings) ? given.settings : {});
  conversation.title = text(given?.title) || UNTITLED;
  conversation.created = number(given?.created);
  conversation.updated = number(given?.updated);
  const nodes = isObject(given?.nodes) ? Object.values(given.nodes) : [];
  const ids = new Map(nodes.map((node) => [node?.id, newId()]));
  for (const node of nodes) {
    if (!ROLES.has(node?.role)) throw new Error("This file has a message of an unknown role.");
    const id = ids.get(node.id);
    conversation.nodes[id] = readNode(node, id, ids.get(node.parent) ?? null);
  }
  for (const node of Object.values(conversation.nodes)) refuseCycles(conversation, node);
  conversation.leaf = ids.get(given?.leaf) ?? Object.keys(conversation.nodes).at(-1) ?? null;
  return conversation;
}

function readNode(node, id, parent) {
  const read = {id, parent, role: node.role, created: number(node.created), content: text(node.content)};
  if (Array.isArray(node.images)) {
    read.images = node.images.filter((url) => /^data:image\/(png|jpeg|webp|gif);base64,/.test(url));
  }
  if (node.role === "tool") read.toolCallId = text(node.toolCallId);
  if (node.role === "assistant") {
    read.reasoning = text(node.reasoning);
    read.toolCalls = (Array.isArray(node.toolCalls) ? node.toolCalls : []).map((call) =>
      ({id: text(call?.id), name: text(call?.name), arguments: text(call?.arguments)}));
    read.answer = readAnswer(node.answer);
  }
  return read;
}

function readAnswer(given) {
  const answer = {finish: text(given?.finish) || "stop", error: text(given?.error), tokens: []};
  for (const name of ["ttftMs", "totalMs", "chunks"]) answer[name] = number(given?.[name]);
  for (const name of ["usage", "timings"]) answer[name] = isObject(given?.[name]) ? given[name] : null;
  if (Array.isArray(given?.tokens)) {
    answer.tokens = given.tokens.filter((token) => Array.isArray(token)).map(([shown, logprob, others, at]) => [
      text(shown), number(logprob),
      (Array.isArray(others) ? others : []).map((one) => [text(one?.[0]), number(one?.[1])]), number(at)]);
  }
  return answer;
}

function refuseCycles(conversation, node) {
  const seen = new Set();
  for (let current = node; current; current = conversation.nodes[current.parent]) {
    if (seen.has(current.id)) throw new Error("This file has a message that follows itself.");
    seen.add(current.id);
  }
}

const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
