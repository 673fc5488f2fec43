import { chunkClass, make } from "./dom.js";

const SIGNS = { "\n": "↵", "\t": "→", "\r": "␍", " ": "·", "\u00a0": "⍽", "\u007f": "␡" };
const UNSEEN = /^[\p{C}\p{Z}\p{M}]$/u; // controls, odd spaces and marks without a letter

/** Bounds of the colours of confidence, lowest first, and what the legend calls them. */
const CONFIDENCE = [0.1, 0.25, 0.5, 0.75, 0.9, Infinity];
export const CONFIDENCE_NAMES = ["under 10 %", "10–25 %", "25–50 %", "50–75 %", "75–90 %", "90 % and over"];
export const ORDERS = 8;

/** A letter as it is shown, and whether it stands for one that cannot be seen. */
function sign(letter) {
  if (SIGNS[letter]) return SIGNS[letter];
  if (letter < " ") return String.fromCodePoint(0x2400 + letter.codePointAt(0));
  if (UNSEEN.test(letter)) return `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return null;
}

function letters(text) {
  return Array.from(text, (letter) => {
    const shown = sign(letter);
    return shown ? make("span", { className: "sign" }, shown) : letter;
  });
}

const percent = (p) => (p >= 0.995 && p < 1 ? "over 99 %" : p < 0.005 ? "below 1 %" : `${Math.round(100 * p)} %`);

/**
 * The positions of a recording as cells that are shown filled up to a step. One stop of the Tab key; arrows move
 * from cell to cell. `tell(sentence)` hears about the cell that is pointed at or focused.
 */
export class Canvas {
  constructor(container, name, tell) {
    this.container = container;
    this.tell = tell;
    this.recording = null;
    this.places = [];
    this.current = 0;
    this.at = 0;
    this.colours = "chunk";
    container.classList.add("tokens");
    container.setAttribute("role", "listbox");
    container.setAttribute("aria-label", name);
    container.addEventListener("keydown", (event) => this.move(event));
    container.addEventListener("pointerleave", () => this.leave());
    for (const kind of ["pointerover", "focusin", "click"]) {
      container.addEventListener(kind, (event) => {
        const place = event.target.closest(".token");
        if (!place) return;
        if (kind === "click") place.focus();
        this.choose(this.places.indexOf(place));
      });
    }
  }

  /** What is pointed at stays marked only as long as it is. */
  leave() {
    if (!this.container.matches(":focus-within")) this.places[this.current]?.classList.remove("at");
  }

  /** Keep what is being filled in sight where the canvas is longer than its box. */
  follow() {
    const fresh = this.container.querySelector(".fresh");
    const { scrollHeight, clientHeight, scrollTop } = this.container;
    if (!fresh || scrollHeight <= clientHeight) return;
    const top = fresh.offsetTop;
    if (top < scrollTop || top + fresh.offsetHeight > scrollTop + clientHeight) this.container.scrollTop = top - clientHeight / 2;
  }

  /** Show a new recording, which may still grow. */
  open(recording) {
    this.recording = recording;
    this.container.classList.toggle("hundreds", recording.blanks > 99);
    this.container.replaceChildren();
    this.places = [];
    this.current = 0;
    this.grow();
  }

  /** Make cells for positions that the recording has and the canvas has not, and write what is known by now. */
  grow(positions = null) {
    const { cells } = this.recording;
    while (this.places.length < cells.length) {
      const place = make("span", { role: "option", tabIndex: this.places.length ? -1 : 0, ariaSelected: "false" });
      this.places.push(place);
      this.container.append(place);
      this.write(this.places.length - 1);
    }
    positions?.forEach((position) => this.write(position));
  }

  write(position) {
    const { text, token } = this.recording.cells[position];
    const place = this.places[position];
    const special = token !== null && (this.recording.special[token] || (text === "" ? `#${token}` : null));
    place.dataset.special = special ? "1" : "";
    const shown = special ? [special] : text === null ? ["\u00a0"] : letters(text);
    place.replaceChildren(make("span", { className: "letters" }, ...shown));
    if (text?.endsWith("\n") && place.nextSibling?.tagName !== "BR") place.after(make("br"));
  }

  /** The canvas as it was after `at` steps; `fresh` marks what the last of them filled. */
  draw(at, fresh = false) {
    this.at = at;
    this.recording?.cells.forEach((cell, position) => {
      const place = this.places[position];
      const masked = cell.step > at;
      const look = ["token", masked ? "masked" : cell.given ? "given" : this.colour(cell)];
      if (place.dataset.special) look.push("special");
      if (fresh && at && cell.step === at) look.push("fresh");
      if (cell.void && at >= this.recording.steps.length) look.push("void");
      if (place.classList.contains("at")) look.push("at");
      const name = look.join(" ");
      if (place.className !== name) place.className = name;
      const seen = !masked && !cell.given;
      place.dataset.forward = seen ? cell.forward : "";
      place.dataset.chunk = seen ? cell.chunk : "";
    });
    if (fresh) this.follow();
    if (this.container.matches(":hover, :focus-within")) this.say();
  }

  colour(cell) {
    if (this.colours === "chunk") return chunkClass(cell.chunk);
    if (this.colours === "order") return `order-${Math.min(ORDERS, 1 + Math.floor(cell.share * ORDERS - 1e-9))}`;
    return `sure-${1 + CONFIDENCE.findIndex((bound) => cell.p < bound)}`;
  }

  choose(position) {
    const old = this.places[this.current];
    old.classList.remove("at");
    old.setAttribute("aria-selected", "false");
    old.tabIndex = -1;
    this.current = position;
    const place = this.places[position];
    place.classList.add("at");
    place.setAttribute("aria-selected", "true");
    place.tabIndex = 0;
    this.say();
  }

  say() {
    const told = this.describe(this.current);
    this.places[this.current]?.setAttribute("aria-label", told);
    this.tell(told);
  }

  describe(position) {
    const { cells, steps, special } = this.recording;
    const cell = cells[position];
    const name = cell.token === null ? "" : special[cell.token] || JSON.stringify(cell.text);
    if (cell.given) return `${name} · position ${position} · given`;
    if (cell.step > this.at) return `Masked · position ${position}${cell.void ? " · behind the end of the text" : ""}`;
    const window = steps.at(-1).window ? ` of window ${cell.window + 1}` : "";
    const parts = [
      name, `position ${position}`, `chunk ${cell.chunk}${window}`, `forward ${cell.forward}`,
      `probability ${percent(cell.p)}`, `after ${cell.seconds.toFixed(2)} s`,
    ];
    if (cell.void) parts.push("behind the end of the text, not counted");
    return parts.join(" · ");
  }

  move(event) {
    const last = this.places.length - 1;
    const goal = {
      ArrowRight: () => Math.min(last, this.current + 1),
      ArrowLeft: () => Math.max(0, this.current - 1),
      ArrowDown: () => this.across(1),
      ArrowUp: () => this.across(-1),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (!goal || last < 0 || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.places[goal()].focus();
  }

  /** The nearest cell in the line above (−1) or below (1). */
  across(direction) {
    const from = this.places[this.current].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let best = this.current;
    let least = Infinity;
    this.places.forEach((place, position) => {
      const box = place.getBoundingClientRect();
      const down = direction * (box.top - from.top);
      if (down < from.height / 2) return;
      const distance = 1000 * down + Math.abs(box.left + box.width / 2 - middle);
      if (distance < least) [least, best] = [distance, position];
    });
    return best;
  }
}
