// Stores conversations in this browser (IndexedDB). The heads (id, title, time) for the list and the
// whole conversations are stored separately. If the browser forbids storage, the conversations last
// as long as the page.
import {address} from "../shared/api.js";

// The path is part of the name: servers below different prefixes of a host share no conversations.
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

  // `listener(id)` is called when another tab has changed a conversation.
  onChange(listener) {
    this.channel?.addEventListener("message", (event) => listener(event.data));
  }

  // Returns the heads of all conversations, newest first.
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
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore("heads", {keyPath: "id"});
    request.result.createObjectStore("whole", {keyPath: "id"});
  };
  return done(request);
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => reject(request.error ?? new Error("blocked"));
  });
}
