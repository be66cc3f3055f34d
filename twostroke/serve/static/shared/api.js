// Requests to this server: addresses, the API key, errors, and streamed events.
import {apiKey, askKey} from "./key.js";

const ROOT = new URL("../../", import.meta.url);

// The full address of a route: address("v1/models").
export const address = (path) => new URL(path, ROOT).href;

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status; // 0: the server did not answer
    this.code = code;
  }
}

// Sends a request and returns the response if its status is 2xx. Asks the user for an API key if
// the server requires one. `body` is sent as JSON by POST. Throws ApiError, or AbortError when
// `signal` is aborted.
export async function request(path, {body, method, signal} = {}) {
  for (;;) {
    const key = apiKey();
    const response = await send(path, {body, method, signal, key});
    if (response.ok) return response;
    const error = await errorOf(response);
    if (response.status !== 401) throw error;
    // Meanwhile the user may have entered a key for another request: then try again with it.
    if (apiKey() === key && await askKey() === null) throw error;
  }
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const postJson = (path, body, options) => getJson(path, {...options, body});

async function send(path, {body, method, signal, key}) {
  const headers = {Accept: "application/json, text/event-stream"};
  if (key) headers.Authorization = `Bearer ${asBytes(key)}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  try {
    return await fetch(address(path), {
      method: method ?? (body === undefined ? "GET" : "POST"),
      body: body === undefined ? undefined : JSON.stringify(body),
      headers, signal, cache: "no-store", credentials: "omit",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Check that it is running.");
  }
}

// A header consists of bytes. Returns the UTF-8 of a text with one character for each byte.
const asBytes = (text) => String.fromCharCode(...new TextEncoder().encode(text));

async function errorOf(response) {
  let error = null;
  try {
    error = (await response.json()).error;
  } catch { /* not JSON: probably a page of a proxy */ }
  const message = error?.message ?? `The server answers with status ${response.status}.`;
  return new ApiError(message, response.status, error?.code ?? null);
}

// The events of a stream: for await (const {event, receivedAt} of streamEvents(path, body)) …
// `receivedAt`: performance.now() when the bytes of the event were read.
export async function* streamEvents(path, body, {signal} = {}) {
  const response = await request(path, {body: {...body, stream: true}, signal});
  for await (const {data, receivedAt} of serverSentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message ?? "The answer was interrupted.", 0, event.error.code);
    yield {event, receivedAt};
  }
}

// The `data` of each server-sent event of a response's body.
export async function* serverSentEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const receivedAt = performance.now();
      unread += value;
      const parts = unread.split(/\r?\n\r?\n/);
      unread = parts.pop();
      for (const part of parts) {
        const data = part.split(/\r?\n/).filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).replace(/^ /, "")).join("\n");
        if (data) yield {data, receivedAt};
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection was lost during the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
