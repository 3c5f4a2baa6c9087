"use strict";

const at = (id) => document.getElementById(id);
let history = [];
let session = crypto.randomUUID();
let running = null;

function headers() {
  const key = at("key").value;
  return { "Content-Type": "application/json", "x-session-id": session, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function show(role) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  at("talk").append(turn);
  return turn;
}

function scroll() {
  const talk = at("talk");
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 120) talk.scrollTop = talk.scrollHeight;
}

function tell(numbers) {
  const list = at("numbers");
  list.replaceChildren();
  for (const [name, value] of Object.entries(numbers)) {
    if (value === null || value === undefined) continue;
    const term = document.createElement("dt");
    const data = document.createElement("dd");
    term.textContent = name;
    data.textContent = typeof value === "number" ? Number(value.toFixed(2)).toLocaleString() : value;
    list.append(term, data);
  }
}

function drawDepths(timings) {
  const box = at("depths");
  box.replaceChildren();
  const drafted = timings.drafted_by_depth || [];
  drafted.forEach((count, depth) => {
    const share = count ? timings.accepted_by_depth[depth] / count : 0;
    const row = document.createElement("div");
    row.className = "bar";
    const bar = document.createElement("i");
    bar.style.width = `${Math.round(share * 60)}%`;
    row.append(`${depth + 1}`, bar, `${Math.round(share * 100)}%`);
    box.append(row);
  });
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const line = block.split("\n").find((item) => item.startsWith("data: "));
      if (line && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function answer(text) {
  history.push({ role: "user", content: text });
  show("user").textContent = text;
  const turn = show("assistant");
  const content = document.createElement("span");
  let notes = null;
  turn.append(content);
  scroll();
  const body = {
    model: at("model").value || null, messages: history, stream: true, stream_options: { include_usage: true },
    enable_thinking: at("think").checked, max_tokens: Number(at("limit").value) || null,
    temperature: at("temperature").value === "" ? null : Number(at("temperature").value),
  };
  const started = performance.now();
  let first = null;
  let pieces = 0;
  running = new AbortController();
  at("send").textContent = "Stop";
  try {
    const options = { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal };
    const response = await fetch("/v1/chat/completions", options);
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices.length ? chunk.choices[0].delta : {};
      if (delta.reasoning_content) {
        if (!notes) {
          const fold = document.createElement("details");
          const title = document.createElement("summary");
          notes = document.createElement("span");
          title.textContent = "reasoning";
          fold.append(title, notes);
          turn.prepend(fold);
        }
        notes.textContent += delta.reasoning_content;
      }
      if (delta.content) content.textContent += delta.content;
      if (delta.content || delta.reasoning_content) {
        first = first ?? performance.now();
        pieces += 1;
        const seconds = (performance.now() - first) / 1000;
        tell({ "first text, s": (first - started) / 1000, "pieces/s": seconds > 0.2 ? pieces / seconds : null });
      }
      if (chunk.usage) finish(chunk, first === null ? null : (first - started) / 1000);
      scroll();
    }
    history.push({ role: "assistant", content: content.textContent });
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (stopped && content.textContent) history.push({ role: "assistant", content: content.textContent });
    else history.pop();
    const note = document.createElement("div");
    note.className = stopped ? "" : "error";
    note.textContent = stopped ? "(stopped)" : error.message;
    turn.append(note);
  } finally {
    running = null;
    at("send").textContent = "Send";
  }
}

async function finish(chunk, wait) {
  const { usage, timings } = chunk;
  const numbers = {
    "tokens/s": timings.predicted_per_second, "tokens/forward": timings.tokens_per_forward,
    "first text, s": wait, "prompt tokens": usage.prompt_tokens,
    "from cache": usage.prompt_tokens_details.cached_tokens, "new tokens": usage.completion_tokens,
    reasoning: usage.completion_tokens_details.reasoning_tokens, forwards: timings.forwards,
    "denoise steps": timings.denoise_steps, lane: timings.lane, ended: timings.stop_reason,
  };
  tell(numbers);
  drawDepths(timings);
  try {
    const statistics = await (await fetch("/admin/statistics", { headers: headers() })).json();
    const mine = statistics[chunk.model] || {};
    const mib = (bytes) => (bytes === undefined ? null : bytes / 1048576);
    tell({ ...numbers, "cache, MiB": mib(mine.prefix_cache_bytes), "memory, MiB": mib(mine.mlx_active_memory_bytes),
      "peak, MiB": mib(mine.mlx_peak_memory_bytes) });
  } catch { /* the numbers of the answer are enough */ }
}

async function listModels() {
  try {
    const list = await (await fetch("/v1/models", { headers: headers() })).json();
    at("model").replaceChildren(...list.data.map((model) => new Option(model.id)));
  } catch { /* a key is needed first */ }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  answer(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); at("ask").requestSubmit(); }
});
at("fresh").addEventListener("click", () => {
  if (running) running.abort();
  history = [];
  session = crypto.randomUUID();
  at("talk").replaceChildren();
  tell({});
});
at("key").addEventListener("change", listModels);
listModels();
