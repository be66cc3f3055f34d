// The message field: sending, stopping, images, and the number of tokens that the context has left.
import {postJson} from "../shared/api.js";
import {byId, el} from "../shared/dom.js";
import {formatCount} from "./figures.js";

const COUNT_AFTER_MS = 400; // after the last change of the text
const MAX_IMAGE_BYTES = 4 * 1024 ** 2;

// `actions`: send(text, images), stop(), editLast(), requestToCount(draft) → a /tokenize request.
export class Composer {
  constructor(actions) {
    this.actions = actions;
    this.images = [];
    this.text = byId("text");
    this.timer = 0;
    this.counting = null;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    byId("stop").addEventListener("click", () => actions.stop());
    this.text.addEventListener("input", () => {
      this.#fit();
      this.countLater();
    });
    this.text.addEventListener("keydown", (event) => this.#onKey(event));
    byId("attach").addEventListener("click", () => byId("image-file").click());
    byId("image-file").addEventListener("change", (event) => this.#attach([...event.target.files]));
    this.text.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
      if (files.length && this.takesImages) this.#attach(files);
    });
  }

  // Whether the model accepts images.
  set takesImages(takes) {
    byId("attach").hidden = !takes;
  }

  get takesImages() {
    return !byId("attach").hidden;
  }

  // `writing`: an answer is being written.
  show(writing) {
    const focused = document.activeElement === byId(writing ? "send" : "stop");
    this.writing = writing;
    byId("send").hidden = writing;
    byId("stop").hidden = !writing;
    if (focused) byId(writing ? "stop" : "text").focus();
  }

  clear() {
    this.text.value = "";
    this.images = [];
    this.#showImages();
    this.#fit();
  }

  #send() {
    const text = this.text.value.trim();
    if ((!text && !this.images.length) || this.writing) return;
    const images = this.images;
    this.clear();
    this.actions.send(text, images);
  }

  #onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      this.#send();
    }
    if (event.key === "ArrowUp" && !this.text.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #fit() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  async #attach(files) {
    for (const file of files) {
      if (file.size > MAX_IMAGE_BYTES) continue;
      const url = await new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(reader.result);
        reader.onerror = () => reject(reader.error);
        reader.readAsDataURL(file);
      });
      this.images.push(url);
    }
    this.#showImages();
  }

  #showImages() {
    byId("images").hidden = !this.images.length;
    byId("images").replaceChildren(...this.images.map((src, n) => el("span", {},
      el("img", {src, alt: `Image ${n + 1} to send`}),
      el("button", {type: "button", class: "quiet small-button", "aria-label": `Remove image ${n + 1}`, onclick: () => {
        this.images.splice(n, 1);
        this.#showImages();
      }}, "×"))));
  }

  // ── the context ───────────────────────────────────────────────────────────────────────────

  countLater() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#count(), COUNT_AFTER_MS);
  }

  // Shows how many tokens a conversation has and how many are left.
  showCount(count, limit) {
    const left = limit - count;
    const room = left > 0 ? `${formatCount(left)} left` : "no room for an answer; edit an earlier message or begin a new chat";
    byId("context").textContent = `${formatCount(count)} of ${formatCount(limit)} tokens; ${room}`;
    byId("context").classList.toggle("full", left < limit / 10);
  }

  async #count() {
    if (this.writing) return; // counted again after the answer
    this.counting?.abort();
    this.counting = new AbortController();
    const request = this.actions.requestToCount(this.text.value.trim());
    if (!request.messages.length) {
      byId("context").textContent = "";
      return;
    }
    try {
      const counted = await postJson("tokenize", request, {signal: this.counting.signal});
      this.showCount(counted.count, counted.max_model_len);
    } catch {
      byId("context").textContent = ""; // the chat template refuses the messages, or the server is down
    }
  }
}
