// Markdown of a model, which nobody may trust: elements are made one by one and filled with text, never with markup.
// There are no links and no images, so that nothing is loaded and nothing leads elsewhere.

const INLINE = /(`+)(?!`)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([^*]+?)\*\*|\*(?=[^\s*])([^*\n]+?)\*/g;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;

/** Renders a growing text into an element; blocks that did not change keep their nodes. */
export class Markdown {
  constructor(element) {
    this.element = element;
    this.sources = [];
  }

  show(text) {
    const blocks = split(text);
    let same = 0;
    while (same < blocks.length && same < this.sources.length && this.sources[same] === blocks[same].source) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(render(block));
    this.sources = blocks.map((block) => block.source);
  }
}

function split(text) {
  const blocks = [];
  let open = null;
  const add = (kind, line) => {
    if (open && open.kind === kind) open.lines.push(line);
    else blocks.push((open = { kind, lines: [line] }));
  };
  let fence = null;
  for (const line of text.split("\n")) {
    const mark = line.match(/^\s{0,3}(`{3,}|~{3,})(.*)$/);
    if (fence) {
      if (mark && mark[1].startsWith(fence) && !mark[2].trim()) fence = open = null;
      else open.lines.push(line);
    } else if (mark && !mark[2].includes("`")) {
      fence = mark[1];
      blocks.push((open = { kind: "code", language: mark[2].trim(), lines: [] }));
    } else if (!line.trim()) open = null;
    else if (/^#{1,6}\s/.test(line)) {
      blocks.push({ kind: "heading", lines: [line] });
      open = null;
    } else if (/^\s{0,3}([-*_])(\s*\1){2,}\s*$/.test(line)) {
      blocks.push({ kind: "rule", lines: [line] });
      open = null;
    } else if (/^>\s?/.test(line)) add("quote", line.replace(/^>\s?/, ""));
    else if (ITEM.test(line)) add("list", line);
    else if (open && open.kind === "list") open.lines.push(line);
    else if (/^\s*\|.*\|\s*$/.test(line)) add("table", line);
    else add("text", line);
  }
  for (const block of blocks) block.source = `${block.kind} ${block.language || ""}\n${block.lines.join("\n")}`;
  return blocks;
}

function render({ kind, lines, language }) {
  if (kind === "code") return codeBlock(lines.join("\n"), language);
  if (kind === "rule") return make("hr");
  if (kind === "heading") {
    const [, marks, text] = lines[0].match(/^(#+)\s+(.*?)\s*#*$/);
    return filled(make(`h${Math.min(6, marks.length + 2)}`), text);
  }
  if (kind === "list") return list(lines);
  if (kind === "table") return table(lines);
  return filled(make(kind === "quote" ? "blockquote" : "p"), lines.join("\n"));
}

function list(lines) {
  const ordered = /\d/.test(lines[0].match(ITEM)[2]);
  const top = make(ordered ? "ol" : "ul");
  if (ordered) top.start = parseInt(lines[0].match(ITEM)[2], 10);
  const items = [];
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found) items.push({ depth: Math.min(3, Math.floor(found[1].length / 2)), text: line.replace(ITEM, "") });
    else items[items.length - 1].text += `\n${line.trim()}`;
  }
  for (const { depth, text } of items) {
    const item = filled(make("li"), text);
    if (depth) item.className = `deep${depth}`;
    top.append(item);
  }
  return top;
}

function table(lines) {
  const rows = lines.map((line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim()));
  const ruled = rows.length > 1 && rows[1].every((cell) => /^:?-+:?$/.test(cell));
  const body = make("table");
  rows.forEach((cells, number) => {
    if (ruled && number === 1) return;
    const row = make("tr");
    row.append(...cells.map((cell) => filled(make(ruled && number === 0 ? "th" : "td"), cell)));
    body.append(row);
  });
  const box = make("div");
  box.className = "wide";
  box.append(body);
  return box;
}

function codeBlock(text, language) {
  const box = make("div");
  box.className = "code";
  const code = make("code");
  code.textContent = text;
  const block = make("pre");
  block.tabIndex = 0;
  block.append(code);
  const head = make("div");
  head.className = "code-head";
  const name = make("span");
  name.textContent = language || "code";
  head.append(name, copyButton(() => text));
  box.append(head, block);
  return box;
}

export function copyButton(text) {
  const button = make("button");
  button.type = "button";
  button.className = "plain copy";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    const done = await copy(text());
    button.textContent = done ? "Copied" : "Copy failed";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text); // only there over https and on this machine
    return true;
  } catch {
    const area = make("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}

function filled(element, text) {
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    element.append(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [, ticks, code, strong, soft] = found;
    const inner = make(ticks ? "code" : strong ? "strong" : "em");
    inner.textContent = ticks ? code : strong || soft;
    element.append(inner);
  }
  element.append(text.slice(end));
  return element;
}

function make(name) {
  return document.createElement(name);
}
