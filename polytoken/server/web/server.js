// What the page asks the server: JSON, and streams of it. Errors are one class, with a line for people.

let key = sessionStorage.getItem("polytoken.key") || "";

export class ServerError extends Error {
  constructor(message, status = 0, code = "") {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function setKey(value) {
  key = value;
  sessionStorage.setItem("polytoken.key", value);
}

export async function ask(path, { method = "GET", body, headers = {}, signal } = {}) {
  return (await send(path, { method, body, headers, signal })).json();
}

async function send(path, { method, body, headers, signal }) {
  const options = { method, signal, headers: { "Content-Type": "application/json", ...headers } };
  if (key) options.headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", 0, "unreachable");
  }
  if (response.ok) return response;
  let fault = {};
  try {
    fault = (await response.json()).error || {};
  } catch { /* no JSON: the status alone must do */ }
  throw new ServerError(fault.message || `The server answered ${response.status}.`, response.status, fault.code);
}

/** The records of a stream, up to [DONE]. A stream that ends before it is an error. */
export async function* stream(path, { body, headers, signal }) {
  const response = await send(path, { method: "POST", body, headers, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      rest += value;
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = dataOf(block);
        if (data === "[DONE]") return;
        if (data) yield checked(data);
      }
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    throw new ServerError("The connection was lost in the middle of the answer.", 0, "broken_stream");
  }
  throw new ServerError("The answer broke off: the server closed the stream before its end.", 0, "broken_stream");
}

function dataOf(block) {
  const lines = block.split(/\r?\n/).filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
}

function checked(data) {
  let record;
  try {
    record = JSON.parse(data);
  } catch {
    throw new ServerError("The server sent something that is no JSON.", 0, "broken_stream");
  }
  if (record.error) throw new ServerError(record.error.message || "The request failed.", 0, record.error.code);
  return record;
}
