// A canvas settling: every position has its text, the more solid the surer the model is of it.

const FAINT = 30; // least percent of confidence at which an undecided position is shown
const STEPS = 10;

export class Canvas {
  constructor() {
    this.box = document.createElement("figure");
    this.box.className = "canvas";
    this.cells = document.createElement("div");
    this.cells.setAttribute("aria-hidden", "true"); // it changes many times a second
    this.caption = document.createElement("figcaption");
    this.box.append(this.cells, this.caption);
  }

  show({ step, tokens, committed, pieces, confidence, likely, entropy }) {
    while (this.cells.children.length > pieces.length) this.cells.lastChild.remove();
    while (this.cells.children.length < pieces.length) this.cells.append(document.createElement("span"));
    pieces.forEach((piece, place) => {
      const cell = this.cells.children[place];
      const sure = confidence[place];
      const settled = place < committed;
      const known = settled || likely[place] || sure >= FAINT;
      cell.textContent = known && piece ? visible(piece, settled) : "\u00b7";
      cell.className = `${settled ? "settled" : likely[place] ? "likely" : "open"} c${Math.floor((sure * STEPS) / 101)}`;
    });
    const sure = likely.filter((value, place) => value || place < committed).length;
    const unsure = entropy === null ? "" : `, ${entropy.toFixed(2)} nats undecided`;
    this.caption.textContent = `denoise ${step}: ${sure} of ${pieces.length} positions sure${unsure}; ${tokens + committed} tokens settled`;
  }
}

/** What is not final must not move lines, and control characters must be seen. */
function visible(piece, settled) {
  const text = settled ? piece : piece.replaceAll("\n", "\u21b5");
  return text.replace(/[\u0000-\u0009\u000b-\u001f]/g, (mark) => String.fromCharCode(0x2400 + mark.charCodeAt(0)));
}
