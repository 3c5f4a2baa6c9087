// One message on the page: the user's, or an answer with its reasoning, canvas, progress, error and buttons.

import { Canvas } from "./canvas.js";
import { Markdown, copyButton } from "./markdown.js";
import { button, span } from "./numbers.js";

export function userTurn(text) {
  const turn = element("article", "turn user");
  turn.setAttribute("aria-label", "You");
  const body = element("div", "body");
  body.textContent = text;
  turn.append(body);
  return turn;
}

export class AnswerTurn {
  constructor() {
    this.element = element("article", "turn assistant");
    this.element.setAttribute("aria-label", "Answer");
    this.content = "";
    this.reasoning = "";
    this.body = element("div", "body");
    this.shown = new Markdown(this.body);
    this.wait = element("p", "wait");
    this.wait.append(element("i"), document.createTextNode(" waiting"));
    this.element.append(this.wait, this.body);
    this.canvas = null;
    this.started = null;
    this.due = 0;
  }

  /** Say what the answer waits for. */
  waitFor(text) {
    this.wait.lastChild.textContent = ` ${text}`;
  }

  /** Show how far the prompt was read. */
  prompt({ done, of }) {
    this.waitFor(`reading the prompt, ${done} of ${of} tokens`);
  }

  addReasoning(text) {
    if (!this.fold) {
      this.started = performance.now();
      this.fold = element("details", "reasoning");
      this.title = element("summary");
      this.title.textContent = "Thinking\u2026";
      this.notes = element("div");
      this.fold.append(this.title, this.notes);
      this.element.insertBefore(this.fold, this.body);
    }
    this.wait.hidden = true;
    this.reasoning += text;
    this.notes.textContent = this.reasoning;
  }

  addContent(text) {
    this.endReasoning();
    this.wait.hidden = true;
    this.content += text;
    if (!this.due) this.due = setTimeout(() => this.draw(), 60); // rendering every token would cost more than it shows
  }

  addCalls(calls) {
    for (const call of calls) {
      this.calls = this.calls || [];
      const made = (this.calls[call.index] = this.calls[call.index] || { name: "", arguments: "" });
      made.name += call.function.name || "";
      made.arguments += call.function.arguments || "";
    }
    if (!this.called) this.body.after((this.called = element("pre", "calls")));
    this.wait.hidden = true;
    this.called.textContent = this.calls.map((call) => `${call.name}(${call.arguments})`).join("\n");
  }

  showCanvas(frame) {
    this.wait.hidden = true;
    if (!this.canvas) {
      this.canvas = new Canvas();
      this.element.append(this.canvas.box);
    }
    this.canvas.show(frame);
  }

  draw() {
    clearTimeout(this.due);
    this.due = 0;
    this.shown.show(this.content);
    if (this.drawn) this.drawn();
  }

  endReasoning() {
    if (this.started === null) return;
    this.title.textContent = `Thought for ${span((performance.now() - this.started) / 1000)}`;
    this.started = null;
  }

  /** The end: `note` in small print, `error` in red with a way to try again. */
  finish({ note = "", error = "", retry = null } = {}) {
    this.endReasoning();
    this.wait.remove();
    if (this.canvas) this.canvas.box.remove();
    this.draw();
    if (error) {
      const box = element("div", "error");
      box.setAttribute("role", "alert");
      const line = element("p");
      line.textContent = error;
      box.append(line);
      if (retry) box.append(button("Try again", retry));
      this.element.append(box);
      return;
    }
    const foot = element("footer");
    if (note) foot.append(Object.assign(element("span", "note"), { textContent: note }));
    if (this.content) foot.append(copyButton(() => this.content));
    if (retry) {
      const again = button("Ask again", retry);
      again.className = "plain";
      foot.append(again);
    }
    this.element.append(foot);
  }
}

export function element(name, style = "") {
  const made = document.createElement(name);
  if (style) made.className = style;
  return made;
}
