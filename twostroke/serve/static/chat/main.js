// The chat page. It shows one conversation at a time, with the server's model.
import {getJson} from "../shared/api.js";
import {announce, byId, el} from "../shared/dom.js";
import {emptyAnswer, requestBody, writeAnswer} from "./answer.js";
import {Composer} from "./composer.js";
import {
  addNode, apiMessages, exported, imported, newConversation, pathOf, showBranch, siblings, UNTITLED,
} from "./conversation.js";
import {askName, confirmed, showKeys} from "./dialogs.js";
import {MessageView} from "./messages.js";
import {editSettings, lastSettings} from "./settings.js";
import {Sidebar} from "./sidebar.js";
import {Store} from "./store.js";

const SAVE_EVERY_MS = 1000; // while an answer is being written
const MAX_FILE_BYTES = 64 * 1024 ** 2;
const NEAR_END_PX = 80; // the log follows a stream if it is scrolled to within this of its end

class Chat {
  constructor(store) {
    this.store = store;
    this.model = null;
    this.defaults = {};
    this.writing = null; // {node, abort} of the answer that is being written
    this.views = [];
    this.sidebar = new Sidebar((id) => this.open(id));
    this.composer = new Composer({
      send: (text, images) => this.send(text, images),
      stop: () => this.stop(),
      editLast: () => this.views.findLast((view) => view.node.role === "user")?.edit(),
      requestToCount: (draft) => this.requestToCount(draft),
    });
    this.actions = {
      edit: (node, text) => this.send(text, node.images ?? [], node.parent),
      regenerate: (node) => this.answer(node.parent),
      step: (node, by) => this.step(node, by),
      giveResult: (node, call, text) => this.giveResult(node, call, text),
      hasResult: (node, call) => Object.values(this.conversation.nodes)
        .some((one) => one.parent === node.id && one.role === "tool" && one.toolCallId === call.id),
    };
    this.#listen();
  }

  async start() {
    if (!this.store.isPermanent) this.notice("This browser forbids storage: conversations are lost when you close the page.");
    await this.open(idInAddress());
    await this.describeModel();
    this.composer.countLater();
  }

  async describeModel() {
    try {
      const [models, props] = await Promise.all([getJson("v1/models"), getJson("props")]);
      this.model = models.data[0].id;
      byId("model").textContent = this.model;
      document.title = `${this.model} – twostroke chat`;
      this.defaults = props.default_generation_settings.params;
      this.composer.takesImages = props.modalities.vision;
    } catch (error) {
      this.notice(error.message);
    }
  }

  #listen() {
    const on = (id, action) => byId(id).addEventListener("click", action);
    on("new", () => this.open(""));
    on("settings", () => this.changeSettings());
    on("rename", () => this.rename());
    on("delete", () => this.remove());
    on("save", () => download(exported([this.conversation]), this.conversation.title));
    on("export", async () => download(exported(await this.all()), "conversations"));
    on("import", () => byId("file").click());
    on("keys", showKeys);
    byId("file").addEventListener("change", (event) => this.import(event.target));
    addEventListener("hashchange", () => {
      if (idInAddress() && idInAddress() !== this.conversation.id) this.open(idInAddress());
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.writing && !document.querySelector("dialog[open]")) this.stop();
      if (event.altKey && event.shiftKey && event.code === "KeyN") this.open("");
      if (event.altKey && event.shiftKey && event.code === "KeyS") this.changeSettings();
    });
    this.store.onChange(async (id) => {
      if (id === this.conversation?.id && !this.writing) await this.open(id);
      else await this.showList();
    });
  }

  // ── conversations ─────────────────────────────────────────────────────────────────────────

  // Shows the conversation with this id, or a new conversation if there is none.
  async open(id) {
    this.stop();
    const found = id ? await this.store.get(id) : null;
    this.conversation = found ?? newConversation(lastSettings());
    for (const node of Object.values(this.conversation.nodes)) {
      if (node.answer?.finish === null) node.answer.finish = "stopped"; // the page was closed during it
    }
    history.replaceState(null, "", found ? `#c=${found.id}` : location.pathname + location.search);
    this.sidebar.closeIfDrawer();
    this.render();
    await this.showList();
    this.composer.countLater();
    if (!document.querySelector("dialog[open]")) byId("text").focus();
  }

  async showList() {
    this.sidebar.show(await this.store.heads(), this.conversation.id);
    byId("title").textContent = this.conversation.title === UNTITLED ? "" : this.conversation.title;
    for (const name of ["rename", "save", "delete"]) byId(name).hidden = !this.conversation.leaf;
  }

  async keep() {
    try {
      await this.store.put(this.conversation);
      history.replaceState(null, "", `#c=${this.conversation.id}`);
    } catch (error) {
      this.notice(`The browser could not store this conversation (${error.message}). Export it, or delete other conversations.`);
    }
    await this.showList();
  }

  async all() {
    const heads = await this.store.heads();
    return (await Promise.all(heads.map(({id}) => this.store.get(id)))).filter(Boolean);
  }

  async changeSettings() {
    if (document.querySelector("dialog[open]")) return;
    const settings = await editSettings(this.conversation.settings, this.defaults);
    if (!settings) return;
    this.conversation.settings = settings;
    if (this.conversation.leaf) await this.keep();
    this.composer.countLater();
  }

  async rename() {
    const title = await askName("Rename this chat", "Name", this.conversation.title);
    if (!title) return;
    this.conversation.title = title;
    await this.keep();
  }

  async remove() {
    const {id, title} = this.conversation;
    if (!await confirmed("Delete this chat?", `“${title}” is stored in this browser only. It cannot be restored.`, "Delete")) return;
    this.stop();
    await this.store.remove(id);
    await this.open("");
    announce("Deleted");
  }

  async import(input) {
    const [file] = input.files;
    input.value = "";
    if (!file) return;
    try {
      if (file.size > MAX_FILE_BYTES) throw new Error("This file has more than 64 MiB.");
      const conversations = imported(await file.text());
      for (const conversation of conversations) await this.store.put(conversation);
      if (conversations.length) await this.open(conversations[0].id);
      announce(`${conversations.length} conversations imported`);
    } catch (error) {
      this.notice(error.message);
    }
  }

  // ── messages ──────────────────────────────────────────────────────────────────────────────

  async send(text, images, parent = this.conversation.leaf) {
    if (this.writing) return;
    const node = addNode(this.conversation, parent, "user", {content: text, ...(images.length ? {images} : {})});
    await this.answer(node.id);
  }

  giveResult(node, call, text) {
    if (this.writing) return;
    const result = addNode(this.conversation, this.conversation.leaf, "tool", {content: text, toolCallId: call.id});
    const open = node.toolCalls.filter((one) => !pathOf(this.conversation).some((other) => other.toolCallId === one.id));
    if (!open.length) this.answer(result.id);
    else this.render();
  }

  step(node, by) {
    const beside = siblings(this.conversation, node);
    showBranch(this.conversation, beside[beside.indexOf(node) + by]);
    this.render(node);
    this.keep();
  }

  // Requests a further answer to the message `parent`.
  async answer(parent) {
    if (this.writing) return;
    this.notice("");
    const {conversation} = this;
    if (this.model === null) await this.describeModel();
    const path = pathOf(conversation, parent);
    const node = addNode(conversation, parent, "assistant", {answer: emptyAnswer()});
    const abort = new AbortController();
    this.writing = {node, abort};
    this.composer.show(true);
    this.render();
    byId("log").scrollTop = byId("log").scrollHeight;
    announce("Answering");
    let savedAt = performance.now();
    let frame = 0;
    await this.keep();
    await writeAnswer(node, requestBody(this.model, apiMessages(conversation, path), conversation.settings), {
      signal: abort.signal,
      onChange: () => {
        frame ||= requestAnimationFrame(() => {
          frame = 0;
          this.showGrowth(node);
        });
        if (performance.now() - savedAt > SAVE_EVERY_MS) {
          savedAt = performance.now();
          this.store.put(conversation).catch(() => {});
        }
      },
    });
    this.finish(conversation, node);
  }

  showGrowth(node) {
    const log = byId("log");
    const follows = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    this.views.find((view) => view.node === node)?.update();
    if (follows) log.scrollTop = log.scrollHeight;
  }

  finish(conversation, node) {
    this.writing = null;
    this.composer.show(false);
    conversation.updated = Date.now();
    const shown = conversation === this.conversation;
    if (!shown) {
      this.store.put(conversation).then(() => this.showList());
      return;
    }
    this.render();
    this.keep();
    const {usage, finish, error} = node.answer;
    announce(error || `Answer ${finish === "stopped" ? "stopped" : "finished"}: ${usage?.completion_tokens ?? node.answer.chunks} tokens`);
    this.composer.countLater();
  }

  stop() {
    this.writing?.abort.abort();
  }

  requestToCount(draft) {
    const {conversation} = this;
    const messages = apiMessages(conversation, pathOf(conversation));
    if (draft) messages.push({role: "user", content: draft});
    const tools = conversation.settings.tools?.trim();
    const last = messages.at(-1)?.role;
    return {messages, ...(tools ? {tools: JSON.parse(tools)} : {}), add_generation_prompt: last === "user" || last === "tool"};
  }

  // ── the page ──────────────────────────────────────────────────────────────────────────────

  // Redraws the messages. The focus stays, or goes to the same button of the message that replaces
  // `replaced`.
  render(replaced = null) {
    const log = byId("log");
    const focused = log.contains(document.activeElement) ? document.activeElement : null;
    const place = this.views.findIndex((view) => view.element.contains(focused) || view.node === replaced);
    const label = focused?.getAttribute("aria-label") ?? focused?.textContent;
    const before = new Map(this.views.map((view) => [view.node.id, view]));
    const following = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END_PX;
    const scrolled = log.scrollTop;
    this.views = pathOf(this.conversation).map((node) => this.#viewOf(node, before.get(node.id)));
    log.replaceChildren(...(this.views.length ? this.views.map((view) => view.element) : [emptyLog()]));
    log.scrollTop = following ? log.scrollHeight : scrolled;
    if (focused && !log.contains(document.activeElement)) {
      const buttons = [...this.views[place]?.element.querySelectorAll("button:not(:disabled)") ?? []];
      const same = buttons.find((one) => (one.getAttribute("aria-label") ?? one.textContent) === label);
      (same ?? buttons[0] ?? byId("text")).focus({preventScroll: true});
    }
  }

  #viewOf(node, before) {
    const beside = siblings(this.conversation, node);
    const branch = {number: beside.indexOf(node) + 1, count: beside.length};
    const state = `${branch.number}/${branch.count}/${node.answer?.finish}`;
    if (before?.node === node && before.state === state && !before.editor) {
      before.update();
      return before;
    }
    const view = new MessageView(node, branch, this.actions);
    view.state = state;
    return view;
  }

  notice(text) {
    byId("notice").textContent = text;
    byId("notice").hidden = !text;
  }
}

const idInAddress = () => (location.hash.startsWith("#c=") ? location.hash.slice(3) : "");

const emptyLog = () => el("div", {class: "empty"},
  el("p", {class: "big"}, "Ask the model something."),
  el("p", {class: "soft"}, "Under each answer you see its time to first token, its speed, and what the prefix cache saved. “Tokens” shows the gap before every token and what caused it."));

function download(text, title) {
  const name = title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "chat";
  const url = URL.createObjectURL(new Blob([text], {type: "application/json"}));
  el("a", {href: url, download: `${name}.json`}).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

await new Chat(await Store.open()).start();
document.documentElement.dataset.ready = "true";
