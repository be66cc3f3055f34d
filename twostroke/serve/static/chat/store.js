// Conversations, kept in this browser (IndexedDB): a small head of each for the list, and each
// whole one by itself. Where the browser stores nothing they last as long as the page.
import {address} from "../shared/api.js";

// Servers below different prefixes of one host have different conversations.
const NAME = `twostroke-chat:${new URL(address("")).pathname}`;

export class Store {
  static async open() {
    try {
      return new Store(await openDatabase());
    } catch {
      return new Store(null);
    }
  }

  constructor(database) {
    this.database = database;
    this.memory = new Map();
    this.channel = "BroadcastChannel" in self ? new BroadcastChannel(NAME) : null;
  }

  get isPermanent() {
    return this.database !== null;
  }

  // `listener(id)`: another tab has changed this conversation.
  onChange(listener) {
    this.channel?.addEventListener("message", (event) => listener(event.data));
  }

  // The newest first.
  async heads() {
    const heads = this.database
      ? await done(this.database.transaction("heads").objectStore("heads").getAll())
      : [...this.memory.values()].map(headOf);
    return heads.sort((a, b) => b.updated - a.updated);
  }

  async get(id) {
    if (!this.database) return this.memory.get(id) ?? null;
    return await done(this.database.transaction("whole").objectStore("whole").get(id)) ?? null;
  }

  async put(conversation) {
    await this.#write((heads, whole) => {
      heads.put(headOf(conversation));
      whole.put(conversation);
    }, () => this.memory.set(conversation.id, structuredClone(conversation)));
    this.channel?.postMessage(conversation.id);
  }

  async remove(id) {
    await this.#write((heads, whole) => {
      heads.delete(id);
      whole.delete(id);
    }, () => this.memory.delete(id));
    this.channel?.postMessage(id);
  }

  async #write(change, changeMemory) {
    if (!this.database) {
      changeMemory();
      return;
    }
    const transaction = this.database.transaction(["heads", "whole"], "readwrite");
    change(transaction.objectStore("heads"), transaction.objectStore("whole"));
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}

const headOf = ({id, title, updated}) => ({id, title, updated});

function openDatabase() {
  const asked = indexedDB.open(NAME, 1);
  asked.onupgradeneeded = () => {
    asked.result.createObjectStore("heads", {keyPath: "id"});
    asked.result.createObjectStore("whole", {keyPath: "id"});
  };
  return done(asked);
}

function done(asked) {
  return new Promise((resolve, reject) => {
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = asked.onblocked = () => reject(asked.error ?? new Error("blocked"));
  });
}
