// The page: one conversation at a time, and what the server says of itself beside it.

import { Numbers, showMemory } from "./numbers.js";
import { ask, setKey, stream } from "./server.js";
import { Talks, newId } from "./talks.js";
import { AnswerTurn, userTurn } from "./turn.js";

const at = (id) => document.getElementById(id);
const talks = new Talks();
const SETTINGS = "polytoken.settings";
let talk = { id: newId(), messages: [] };
let running = null; // the AbortController of the answer in progress
let health = null;
let models = null; // what /admin/models says, where it may be asked

// -- the answer --------------------------------------------------------------------------------------------------

async function send(text) {
  talk.messages.push({ role: "user", content: text });
  talks.keep(talk);
  at("empty").hidden = true;
  at("talk").append(userTurn(text));
  drawTalks();
  await answer();
}

async function answer() {
  const mine = talk;
  const turn = new AnswerTurn();
  at("talk").append(turn.element);
  turn.drawn = follow;
  const chosen = models?.data.find((model) => model.id === at("model").value);
  if (chosen && !chosen.loaded) turn.waitFor(`loading ${chosen.id}`);
  follow(true);
  const controller = (running = new AbortController());
  drawSend();
  at("talk").setAttribute("aria-busy", "true");
  const numbers = new Numbers();
  const again = () => retry(mine, turn);
  try {
    let finish = "";
    const options = { body: bodyOf(mine), headers: { "x-session-id": mine.id }, signal: controller.signal };
    for await (const chunk of stream("/v1/chat/completions", options)) {
      if (chunk.polytoken) watch(chunk.polytoken, turn, numbers);
      if (chunk.usage) numbers.finish(chunk);
      for (const choice of chunk.choices) {
        const { reasoning_content: reasoning, content, tool_calls: calls } = choice.delta;
        if (reasoning) turn.addReasoning(reasoning);
        if (content) turn.addContent(content);
        if (calls) turn.addCalls(calls);
        finish = choice.finish_reason || finish;
      }
      follow();
    }
    remember(mine, turn);
    turn.finish({ note: numbers.summary + (finish === "length" ? "; cut at the limit of tokens" : ""), retry: again });
    say(`The answer is complete: ${numbers.tokens} tokens.`);
  } catch (error) {
    if (error.name === "AbortError") {
      if (turn.content) remember(mine, turn);
      turn.finish({ note: "stopped", retry: again });
      say("Stopped.");
    } else {
      turn.finish({ error: error.message, retry: again });
      if (error.status === 401) askForKey(error.message);
      if (error.code === "unreachable" || error.code === "broken_stream") checkHealth();
    }
  } finally {
    if (running === controller) running = null;
    at("talk").setAttribute("aria-busy", "false");
    drawSend();
    follow();
    refresh();
  }
}

function watch({ prompt, progress, canvas }, turn, numbers) {
  if (prompt) turn.prompt(prompt);
  if (progress) numbers.step(progress);
  if (!canvas) return;
  turn.showCanvas(canvas);
  numbers.denoise(canvas.step);
}

function remember(mine, turn) {
  mine.messages.push({ role: "assistant", content: turn.content, reasoning: turn.reasoning || undefined });
  talks.keep(mine);
}

/** Take back the latest answer of this conversation, if there is one, and ask again. */
function retry(mine, turn) {
  if (running || mine !== talk) return;
  if (mine.messages.at(-1)?.role === "assistant") {
    if (at("talk").lastElementChild !== turn.element) return; // only the latest can be taken back
    mine.messages.pop();
  }
  turn.element.remove();
  answer();
}

function bodyOf(mine) {
  const given = settings();
  const history = [];
  for (const { role, content } of mine.messages) {
    const last = history.at(-1);
    // A question that got no answer is part of the next one: many templates insist on turns that alternate.
    if (last && role === "user" && last.role === "user") last.content += `\n\n${textOf({ content })}`;
    else history.push({ role, content: textOf({ content }) });
  }
  const system = given.system ? [{ role: "system", content: given.system }] : [];
  delete given.system;
  return {
    ...given, model: at("model").value || null, messages: [...system, ...history], stream: true,
    stream_options: { include_usage: true }, polytoken: { watch: true },
  };
}

/** Keep the end in sight, unless the reader has scrolled away from it. */
function follow(always = false) {
  const box = at("talk");
  if (always || box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

function say(text) {
  at("spoken").textContent = text;
}

// -- settings ----------------------------------------------------------------------------------------------------

function settings() {
  const given = {};
  for (const field of at("settings").elements) {
    if (!field.name || field.closest("[hidden]")) continue;
    if (field.type === "checkbox") given[field.name] = field.checked;
    else if (field.value.trim()) given[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return given;
}

function loadSettings() {
  let kept = {};
  try {
    kept = JSON.parse(localStorage.getItem(SETTINGS) || "{}");
  } catch { /* the defaults, then */ }
  for (const field of at("settings").elements) {
    if (!(field.name in kept)) continue;
    if (field.type === "checkbox") field.checked = kept[field.name];
    else field.value = kept[field.name];
  }
}

function keepSettings() {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings()));
  } catch { /* they hold for this visit */ }
}

// -- conversations -----------------------------------------------------------------------------------------------

function drawTalks() {
  talks.draw(at("talk-list"), talk.id, { open, fork, clear });
  at("clear-all").hidden = !talks.entries().length;
}

function show(chosen) {
  if (running) running.abort();
  talk = chosen;
  const box = at("talk");
  box.replaceChildren(at("empty"));
  at("empty").hidden = chosen.messages.length > 0;
  for (const message of chosen.messages) {
    if (message.role === "user") box.append(userTurn(textOf(message)));
    if (message.role !== "assistant") continue;
    const turn = new AnswerTurn();
    const reasoning = message.reasoning || message.reasoning_content;
    if (reasoning) {
      turn.addReasoning(reasoning);
      turn.started = null;
      turn.title.textContent = "Reasoning";
    }
    turn.content = textOf(message);
    turn.finish({ retry: message === chosen.messages.at(-1) ? () => retry(chosen, turn) : null });
    box.append(turn.element);
  }
  if (chosen.messages.at(-1)?.role === "user") {
    const turn = new AnswerTurn();
    turn.finish({ note: "not answered", retry: () => retry(chosen, turn) });
    box.append(turn.element);
  }
  new Numbers();
  drawTalks();
  closeDrawers();
  follow(true);
  at("text").focus();
}

function textOf(message) {
  if (typeof message.content === "string") return message.content;
  return (message.content || []).map((part) => part.text || "").join("");
}

/** One that this browser does not know is another client's: its messages are the server's, if it still has them. */
async function open(entry) {
  const mine = await messagesOf(entry);
  if (mine) show(mine);
}

async function messagesOf(entry) {
  const kept = talks.find(entry.id);
  if (kept) return kept;
  try {
    const query = entry.session ? `?model=${encodeURIComponent(entry.session.model)}` : "";
    const record = await ask(`/admin/sessions/${encodeURIComponent(entry.id)}${query}`);
    if (!record.messages) {
      tellTalks("The server has this conversation's tokens, but no longer its messages: it was restarted.");
      return null;
    }
    return { id: entry.id, messages: record.messages.filter((message) => message.role !== "system") };
  } catch (error) {
    tellTalks(error.message);
    return null;
  }
}

async function fork(entry) {
  const source = await messagesOf(entry);
  if (!source) return;
  const made = { id: newId(), messages: structuredClone(source.messages) };
  try {
    if (entry.session) await ask(`/admin/sessions/${encodeURIComponent(entry.id)}/fork?model=${encodeURIComponent(entry.session.model)}`, { method: "POST", body: { to: made.id } });
  } catch (error) {
    tellTalks(`Forked here only: ${error.message}`); // its first turn then finds the states by the text
  }
  talks.keep(made);
  show(made);
  refresh();
}

async function clear(entry) {
  try {
    if (entry.session) await ask(`/admin/sessions/${encodeURIComponent(entry.id)}?model=${encodeURIComponent(entry.session.model)}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) {
      tellTalks(error.message);
      return;
    }
  }
  talks.forget(entry.id);
  if (entry.id === talk.id) show({ id: newId(), messages: [] });
  refresh();
}

async function clearAll() {
  if (!confirm("Forget all conversations in this browser, and all sessions and prompt states on the server, other clients' too?")) return;
  talks.forgetAll();
  show({ id: newId(), messages: [] });
  try {
    await ask("/admin/sessions", { method: "DELETE" });
  } catch (error) {
    tellTalks(error.message);
  }
  refresh();
}

function tellTalks(text) {
  at("talk-note").textContent = text;
  at("talk-note").setAttribute("role", "status");
}

// -- what the server says of itself --------------------------------------------------------------------------------

async function refresh() {
  drawTalks();
  try {
    models = await ask("/admin/models");
    at("memory-note").textContent = "";
    showMemory(models, at("model").value, settle);
    talks.served = (await ask("/admin/sessions")).data;
    if (at("talk-note").getAttribute("role") !== "status") at("talk-note").textContent = "";
  } catch (error) {
    models = null;
    talks.served = [];
    at("memory").replaceChildren();
    const refused = error.status === 401 || error.status === 403;
    at("memory-note").textContent = refused ? "Shown to those who hold the admin key." : error.message;
  }
  drawTalks();
  drawLane();
}

async function settle(name, action) {
  at("memory-note").textContent = `${action}ing ${name}\u2026`;
  let fault = "";
  try {
    await ask(`/admin/models/${encodeURIComponent(name)}/${action}`, { method: "POST" });
  } catch (error) {
    fault = error.message;
  }
  await refresh();
  if (fault) at("memory-note").textContent = fault;
}

async function listModels() {
  try {
    const list = await ask("/v1/models");
    const before = at("model").value;
    at("model").replaceChildren(...list.data.map((model) => new Option(model.id, model.id)));
    if (list.data.some((model) => model.id === before)) at("model").value = before;
  } catch (error) {
    if (error.status === 401) askForKey(error.message);
  }
}

async function checkHealth() {
  let word = "offline";
  try {
    const response = await fetch("/health");
    const before = health;
    health = await response.json();
    word = health.status === "ok" ? "ready" : health.status;
    at("show-key").hidden = !(health.settings.api_key || health.settings.admin_key);
    if (before === null) {
      await listModels();
      refresh();
    }
  } catch {
    health = null;
  }
  at("state").className = word;
  if (at("state").lastElementChild.textContent !== word) at("state").lastElementChild.textContent = word;
  drawLane();
  clearTimeout(checkHealth.due);
  checkHealth.due = setTimeout(checkHealth, health === null ? 2000 : 60000);
}

function drawLane() {
  const lane = health?.models?.[at("model").value]?.lane;
  for (const row of document.querySelectorAll(".canvas-only")) row.hidden = lane !== "canvas";
}

// -- key, drawers, keyboard ----------------------------------------------------------------------------------------

function askForKey(why) {
  if (why) at("key-why").textContent = `${why}. It is kept in this tab alone.`;
  if (!at("key-dialog").open) at("key-dialog").showModal();
}

async function useKey() {
  setKey(at("key").value.trim());
  at("key").value = "";
  await listModels();
  refresh();
}

function drawer(id, handle) {
  handle.addEventListener("click", () => {
    const shown = !at(id).classList.contains("shown");
    closeDrawers();
    at(id).classList.toggle("shown", shown);
    handle.setAttribute("aria-expanded", String(shown));
    at("shade").hidden = !shown;
    if (shown) at(id).querySelector("button, input, select, textarea")?.focus();
  });
}

function closeDrawers() {
  for (const [id, handle] of [["talks", "show-talks"], ["panel", "show-panel"]]) {
    at(id).classList.remove("shown");
    at(handle).setAttribute("aria-expanded", "false");
  }
  at("shade").hidden = true;
}

function drawSend() {
  at("send").textContent = running ? "Stop" : "Send";
  at("send").classList.toggle("stop", Boolean(running));
}

function grow() {
  const text = at("text");
  text.style.height = "auto";
  text.style.height = `${Math.min(text.scrollHeight + 2, innerHeight * 0.4)}px`;
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) {
    running.abort();
    return;
  }
  const text = at("text").value.trim();
  if (!text) return;
  at("text").value = "";
  grow();
  send(text);
});
at("text").addEventListener("input", grow);
at("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) at("ask").requestSubmit(); // Escape stops; a hasty Enter does not
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("key-dialog").open) return;
  if (!at("shade").hidden) closeDrawers();
  else if (running) running.abort();
});
at("shade").addEventListener("click", closeDrawers);
at("fresh").addEventListener("click", () => show({ id: newId(), messages: [] }));
at("clear-all").addEventListener("click", clearAll);
at("show-key").addEventListener("click", () => askForKey(""));
at("no-key").addEventListener("click", () => at("key-dialog").close());
at("key-form").addEventListener("submit", useKey);
at("settings").addEventListener("input", keepSettings);
at("settings").addEventListener("submit", (event) => event.preventDefault());
at("model").addEventListener("change", () => {
  drawLane();
  refresh();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) checkHealth();
});
drawer("talks", at("show-talks"));
drawer("panel", at("show-panel"));
loadSettings();
drawTalks();
checkHealth();
