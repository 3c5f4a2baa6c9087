// The figures of an answer while it comes: rates, tokens of each forward, drafts by depth; and memory.

const at = (id) => document.getElementById(id);
const BARS = 56;

export class Numbers {
  constructor() {
    this.started = performance.now();
    this.first = null;
    this.tokens = 0;
    this.forwards = 0;
    this.before = null;
    this.denoises = null;
    this.bars = [];
    this.summary = "";
    this.figures(null, null);
    at("strip").replaceChildren();
    at("depths").replaceChildren();
    tell({});
  }

  /** Take the number of denoises so far, which come before any token. */
  denoise(count) {
    this.denoises = count;
    this.tell();
  }

  tell() {
    const first = this.first === null ? null : span((this.first - this.started) / 1000);
    tell({ tokens: this.tokens, forwards: this.forwards || null, denoises: this.denoises, "first token": first });
  }

  /** Take the server's word on how far the answer is: tokens and forwards so far. */
  step({ tokens, forwards }) {
    const now = performance.now();
    if (this.first === null) {
      this.first = now;
      this.before = tokens;
    }
    const steps = forwards - this.forwards;
    for (let empty = 1; empty < Math.min(steps, BARS); empty += 1) this.bars.push(0);
    if (steps > 0) this.bars.push(tokens - this.tokens);
    this.bars = this.bars.slice(-BARS);
    this.tokens = tokens;
    this.forwards = forwards;
    const seconds = (now - this.first) / 1000;
    this.figures(seconds > 0.3 && tokens > this.before ? (tokens - this.before) / seconds : null, tokens / forwards);
    this.draw();
    this.tell();
  }

  figures(rate, yielded) {
    at("rate").textContent = rate ? figure(rate) : "\u2013";
    at("yield").textContent = yielded ? figure(yielded, 2) : "\u2013";
    at("glance").textContent = rate ? `${figure(rate)}/s, ${figure(yielded, 2)}/forward` : "";
    at("glance").title = rate ? "tokens a second, tokens a forward" : "";
  }

  draw() {
    const strip = at("strip");
    const most = Math.max(2, ...this.bars);
    while (strip.children.length < this.bars.length) strip.append(document.createElement("i"));
    this.bars.forEach((count, place) => {
      strip.children[place].style.height = `${Math.max(3, (100 * count) / most)}%`;
      strip.children[place].className = count ? "" : "none";
    });
    const mean = this.bars.reduce((sum, count) => sum + count, 0) / (this.bars.length || 1);
    strip.setAttribute("aria-label", `Tokens of each of the last ${this.bars.length} forwards: ${mean.toFixed(2)} on average`);
    strip.title = `the last ${this.bars.length} forwards, up to ${most} tokens each`;
  }

  /** The server's own figures at the end. */
  finish({ usage, timings }) {
    this.figures(timings.predicted_per_second, timings.tokens_per_forward);
    const rate = timings.predicted_per_second ? `${at("rate").textContent} tokens/s, ` : "";
    this.summary = `${usage.completion_tokens.toLocaleString()} tokens, ${rate}${at("yield").textContent} tokens/forward`;
    tell({
      tokens: usage.completion_tokens, forwards: timings.forwards,
      reasoning: usage.completion_tokens_details.reasoning_tokens || null,
      prompt: usage.prompt_tokens, "from cache": usage.prompt_tokens_details.cached_tokens,
      "prompt time": span(timings.prompt_ms / 1000),
      "first token": timings.ttft_ms === null ? null : span(timings.ttft_ms / 1000),
      denoises: timings.denoise_steps, lane: timings.lane, ended: timings.stop_reason, seed: String(timings.seed),
    });
    depths(timings.drafted_by_depth || [], timings.accepted_by_depth || []);
  }
}

function depths(drafted, accepted) {
  const box = at("depths");
  box.replaceChildren();
  if (!drafted.length) return;
  const title = document.createElement("h3");
  title.textContent = "Drafts accepted, by depth";
  const rows = document.createElement("ol");
  drafted.forEach((count, depth) => {
    const share = count ? accepted[depth] / count : 0;
    rows.append(bar(String(depth + 1), share, `${Math.round(100 * share)}%`, `${accepted[depth]} of ${count} drafts`, "li"));
  });
  box.append(title, rows);
}

export function bar(name, share, value, title, element = "div") {
  const row = document.createElement(element);
  row.className = "bar";
  row.title = title;
  const label = document.createElement("span");
  label.textContent = name;
  const track = document.createElement("div");
  const fill = document.createElement("i");
  fill.style.width = `${Math.max(0, Math.min(100, 100 * share))}%`;
  track.append(fill);
  const text = document.createElement("span");
  text.textContent = value;
  row.append(label, track, text);
  return row;
}

function tell(numbers) {
  const parts = [];
  for (const [name, value] of Object.entries(numbers)) {
    if (value === null || value === undefined) continue;
    const term = document.createElement("dt");
    const data = document.createElement("dd");
    term.textContent = name;
    data.textContent = typeof value === "number" ? value.toLocaleString() : value;
    parts.push(term, data);
  }
  at("numbers").replaceChildren(...parts);
}

/** What is in memory: weights, the cache within its budget, the process. */
export function showMemory(models, chosen, act) {
  const parts = [];
  const { process_bytes: process, available_bytes: free } = models.memory;
  const whole = (process || 0) + free;
  if (process) parts.push(bar("Process", process / whole, size(process), `${size(free)} more can be had`));
  for (const model of models.data) {
    const head = document.createElement("h3");
    head.textContent = model.id;
    if (model.id === chosen) head.className = "chosen";
    parts.push(head);
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = model.loaded
      ? [model.lane, model.dtype, model.device, model.in_progress ? `${model.in_progress} running` : ""].filter(Boolean).join(", ")
      : "not in memory";
    parts.push(note);
    if (model.loaded) {
      if (model.weight_bytes) parts.push(bar("Weights", model.weight_bytes / whole, size(model.weight_bytes), "in memory"));
      if (model.cache_limit_bytes) {
        const { cache_bytes: used, cache_limit_bytes: limit } = model;
        parts.push(bar("Cache", used / limit, `${size(used)} of ${size(limit)}`, "reusable prompt states"));
      }
    }
    const row = document.createElement("p");
    row.className = "buttons";
    if (model.changed_on_disk) row.append(button("Load changed files", () => act(model.id, "reload")));
    row.append(button(model.loaded ? "Unload" : "Load", () => act(model.id, model.loaded ? "unload" : "load"), Boolean(model.in_progress)));
    parts.push(row);
  }
  at("memory").replaceChildren(...parts);
}

export function button(text, act, off = false) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = "small";
  made.textContent = text;
  made.disabled = off;
  made.addEventListener("click", act);
  return made;
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  let value = bytes;
  while (value >= 1024 && place < units.length - 1) {
    value /= 1024;
    place += 1;
  }
  return `${figure(value, value < 10 && place ? 1 : 0)} ${units[place]}`;
}

export function span(seconds) {
  return seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${figure(seconds)} s`;
}

export function figure(value, digits = 1) {
  return value.toLocaleString(undefined, { minimumFractionDigits: digits, maximumFractionDigits: digits });
}
