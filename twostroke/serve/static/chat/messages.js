// Shows a message: text, reasoning, tool calls, figures, and buttons for actions.
import {el} from "../shared/dom.js";
import {copyButton} from "./copy.js";
import {figuresOf, formatCount} from "./figures.js";
import {showMarkdown} from "./markdown.js";
import {TokenView} from "./tokens.js";

const TITLES = {user: "You", assistant: "Assistant", tool: "Tool result"};
const ENDS = {
  length: "The answer has reached its maximum length, or the end of the context.",
  stopped: "You stopped this answer.",
};

// `actions`: edit(node, text), regenerate(node), step(node, ±1), giveResult(node, call, text).
// `branch`: {number, count}: which version of the message this is, and how many there are.
export class MessageView {
  constructor(node, branch, actions) {
    this.node = node;
    this.actions = actions;
    this.reasoningText = el("div", {class: "markdown"});
    this.reasoning = el("details", {class: "reasoning", hidden: true},
      el("summary", {}, "Reasoning"), this.reasoningText);
    this.content = el("div", {class: node.role === "assistant" ? "content markdown" : "content plain"});
    this.calls = el("div", {class: "calls"});
    this.status = el("p", {class: "status soft small"});
    this.error = el("p", {class: "error", hidden: true});
    this.figures = el("ul", {class: "figures soft small", "aria-label": "Figures of this answer"});
    this.tools = el("div", {class: "actions"});
    this.below = el("div");
    const images = (node.images ?? []).map((src) => el("img", {src, alt: "An image that you sent"}));
    const title = el("h2", {class: node.role === "tool" ? "small soft" : "sr"}, TITLES[node.role]);
    const parts = node.role === "assistant"
      ? [this.reasoning, this.content, this.calls, this.status, this.error, this.figures, this.tools, this.below]
      : [images, this.content, this.tools];
    this.element = el("article", {class: `message ${node.role}`, dataset: {id: node.id}}, title, parts.flat());
    this.#makeTools(branch);
    this.update();
  }

  get isWriting() {
    return this.node.role === "assistant" && this.node.answer.finish === null;
  }

  // Shows the changes of the message. A stream calls this once per frame, so it must be fast.
  update() {
    const {node} = this;
    if (node.role !== "assistant") {
      this.content.textContent = node.content;
      return;
    }
    this.element.setAttribute("aria-busy", this.isWriting);
    showMarkdown(this.content, node.content);
    this.reasoning.hidden = !node.reasoning;
    if (node.reasoning) showMarkdown(this.reasoningText, node.reasoning);
    const thinking = this.isWriting && !node.content && node.reasoning;
    this.reasoning.firstChild.textContent = thinking ? "Reasoning …" : "Reasoning";
    this.#showCalls();
    this.status.textContent = this.#statusText();
    this.status.hidden = !this.status.textContent;
    this.error.hidden = !node.answer.error;
    this.error.textContent = node.answer.error;
    this.tools.hidden = this.isWriting;
    this.#showFigures();
  }

  #statusText() {
    const {answer, content, reasoning} = this.node;
    if (!this.isWriting) return ENDS[answer.finish] ?? "";
    if (content || reasoning) return "";
    const {progress} = answer;
    if (!progress) return "Waiting for the first token …";
    return `Prefill: ${formatCount(progress.processed)} of ${formatCount(progress.total)} prompt tokens …`;
  }

  #showFigures() {
    const figures = this.isWriting ? [] : figuresOf(this.node.answer);
    this.figures.hidden = !figures.length;
    this.figures.replaceChildren(...figures.map(([name, value, explanation]) =>
      el("li", {title: explanation}, name && `${name} `, el("b", {}, value))));
  }

  #showCalls() {
    const calls = this.node.toolCalls ?? [];
    while (this.calls.children.length > calls.length) this.calls.lastChild.remove();
    calls.forEach((call, n) => {
      const shown = this.calls.children[n] ?? this.calls.appendChild(this.#callView(call, n));
      shown.querySelector("b").textContent = call.name;
      shown.querySelector("code").textContent = prettyJson(call.arguments);
      shown.querySelector("form").hidden = this.isWriting || this.actions.hasResult(this.node, call);
    });
  }

  #callView(call, n) {
    const id = `result-${this.node.id}-${n}`;
    const input = el("textarea", {id, rows: 2, required: true});
    const form = el("form", {onsubmit: (event) => {
      event.preventDefault();
      this.actions.giveResult(this.node, call, input.value);
    }}, el("label", {for: id}, "Result of this call"), input, el("button", {}, "Give the result to the model"));
    return el("div", {class: "call"}, el("p", {}, "Calls the tool ", el("b", {})),
      el("pre", {tabindex: "0", role: "region", "aria-label": "Arguments"}, el("code")), form);
  }

  // ── actions ───────────────────────────────────────────────────────────────────────────────

  #makeTools(branch) {
    const {node} = this;
    const button = (name, action, more = {}) => el("button", {
      type: "button", class: "quiet small-button", onclick: action, dataset: {action: name}, ...more,
    }, name);
    this.tools.append(...[
      branch.count > 1 && el("span", {class: "branch", role: "group", "aria-label": "Versions of this message"},
        button("‹", () => this.actions.step(node, -1), {"aria-label": "Previous version", disabled: branch.number === 1}),
        el("span", {class: "small soft"}, `${branch.number} of ${branch.count}`),
        button("›", () => this.actions.step(node, 1), {"aria-label": "Next version", disabled: branch.number === branch.count})),
      copyButton(() => node.content, "Copy this message"),
      node.role === "user" && button("Edit", () => this.edit()),
      node.role === "assistant" && button("Regenerate", () => this.actions.regenerate(node)),
      node.role === "assistant" && node.answer.tokens.length > 0 && this.#tokensButton(button),
    ].filter(Boolean));
  }

  #tokensButton(button) {
    const toggle = button("Tokens", () => {
      const open = toggle.getAttribute("aria-expanded") !== "true";
      toggle.setAttribute("aria-expanded", open);
      this.below.replaceChildren(...(open ? [new TokenView(this.node.answer).element] : []));
      this.below.scrollIntoView({block: "nearest"}); // it may be below the visible part
    }, {"aria-expanded": "false"});
    return toggle;
  }

  // Replaces the text by an editor. The edited text becomes a new version of this message.
  edit() {
    if (this.editor) return;
    const id = `edit-${this.node.id}`;
    const area = el("textarea", {id, value: this.node.content, rows: Math.min(12, this.node.content.split("\n").length + 1)});
    const close = () => {
      this.editor.remove();
      this.editor = null;
      this.content.hidden = this.tools.hidden = false;
      this.tools.querySelector("[data-action=Edit]")?.focus();
    };
    const send = () => area.value.trim() && this.actions.edit(this.node, area.value);
    this.editor = el("form", {class: "editor", onsubmit: (event) => {
      event.preventDefault();
      send();
    }, onkeydown: (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send();
    }}, el("label", {for: id, class: "sr"}, "Your message"), area,
    el("div", {class: "row"}, el("button", {type: "button", onclick: close}, "Cancel"), el("button", {class: "primary"}, "Send as a new branch")));
    this.content.hidden = this.tools.hidden = true;
    this.content.after(this.editor);
    area.focus();
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // incomplete, or invalid
  }
}
