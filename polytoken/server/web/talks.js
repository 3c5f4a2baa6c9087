// Conversations: this browser keeps their messages, the server their states. The list shows both.

import { button, size } from "./numbers.js";
import { element } from "./turn.js";

const PLACE = "polytoken.talks";
const MOST = 100;

/** Random, also where a page without https has no crypto.randomUUID. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `page-${[...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

export class Talks {
  constructor() {
    try {
      this.kept = JSON.parse(localStorage.getItem(PLACE) || "[]");
    } catch {
      this.kept = [];
    }
    if (!Array.isArray(this.kept)) this.kept = [];
    this.served = [];
    this.rows = new Map(); // of the list, by conversation
  }

  find(id) {
    return this.kept.find((talk) => talk.id === id) || null;
  }

  /** Keep a conversation as the newest one; the oldest go when the browser gives no more room. */
  keep(talk) {
    talk.updated = Date.now();
    this.kept = [talk, ...this.kept.filter((other) => other.id !== talk.id)].slice(0, MOST);
    this.save();
  }

  forget(id) {
    this.kept = this.kept.filter((talk) => talk.id !== id);
    this.served = this.served.filter((session) => session.id !== id);
    this.save();
  }

  forgetAll() {
    this.kept = [];
    this.served = [];
    this.save();
  }

  save() {
    for (let most = this.kept.length; most >= 0; most = most > 1 ? most >> 1 : most - 1) {
      try {
        localStorage.setItem(PLACE, JSON.stringify(this.kept.slice(0, most)));
        return;
      } catch { /* full, or not allowed: with fewer, then */ }
    }
  }

  /** One entry for each conversation, the latest first. */
  entries() {
    const served = new Map(this.served.map((session) => [session.id, session]));
    const mine = this.kept.map((talk) => ({ id: talk.id, title: titleOf(talk), updated: talk.updated, session: served.get(talk.id) }));
    const known = new Set(this.kept.map((talk) => talk.id));
    const now = Date.now();
    const others = this.served
      .filter((session) => !known.has(session.id))
      .map((session) => ({ id: session.id, title: session.title || session.id, updated: now - 1000 * session.idle_seconds, session }));
    return [...mine, ...others].sort((one, other) => other.updated - one.updated);
  }

  /** Show the entries in the list; what is there already stays the same node, so that a click on it is never lost. */
  draw(list, current, acts) {
    const entries = this.entries();
    const rows = new Map(entries.map(({ id }) => [id, this.rows.get(id) || new Row(acts)]));
    for (const [id, row] of this.rows) if (!rows.has(id)) row.element.remove();
    this.rows = rows;
    entries.forEach((entry, place) => {
      const row = rows.get(entry.id);
      row.show(entry, entry.id === current);
      if (list.children[place] !== row.element) list.insertBefore(row.element, list.children[place] || null);
    });
  }
}

/** One conversation in the list. */
class Row {
  constructor({ open, fork, clear }) {
    this.element = element("li");
    this.name = element("button", "talk");
    this.name.type = "button";
    this.title = element("span");
    this.note = element("small");
    this.name.append(this.title, this.note);
    this.name.addEventListener("click", () => open(this.entry));
    this.fork = tool("Fork", () => fork(this.entry));
    this.clear = tool("Clear", () => clear(this.entry));
    const tools = element("span", "tools");
    tools.append(this.fork, this.clear);
    this.element.append(this.name, tools);
  }

  show(entry, current) {
    this.entry = entry;
    this.element.className = current ? "current" : "";
    if (current) this.name.setAttribute("aria-current", "true");
    else this.name.removeAttribute("aria-current");
    write(this.title, entry.title);
    write(this.note, describe(entry.session));
    this.fork.setAttribute("aria-label", `Fork: ${entry.title}`);
    this.clear.setAttribute("aria-label", `Clear: ${entry.title}`);
  }
}

function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function tool(text, act) {
  const made = button(text, act);
  made.className = "plain";
  return made;
}

function describe(session) {
  if (!session) return "no state on the server";
  return `${session.busy ? "answering, " : ""}${session.tokens.toLocaleString()} tokens, ${size(session.bytes)}`;
}

function titleOf(talk) {
  const first = talk.messages.find((message) => message.role === "user");
  return first ? first.content.replace(/\s+/g, " ").trim().slice(0, 80) : "New conversation";
}
