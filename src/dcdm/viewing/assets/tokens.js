import { chunkClass, make } from "./dom.js";

const SIGNS = { "\n": "↵", "\t": "→", "\r": "␍", " ": "·", "\u00a0": "⍽", "\u007f": "␡" };
const UNSEEN = /^[\p{C}\p{Z}\p{M}]$/u; // controls, odd spaces and marks without a letter

/** What is shown in place of a letter that cannot be seen; null for all others. */
function signOf(letter) {
  if (SIGNS[letter]) return SIGNS[letter];
  if (letter < " ") return String.fromCodePoint(0x2400 + letter.codePointAt(0));
  if (UNSEEN.test(letter)) return `U+${letter.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
  return null;
}

function visible(text) {
  return Array.from(text, (letter) => {
    const sign = signOf(letter);
    return sign ? make("span", { className: "sign" }, sign) : letter;
  });
}

/**
 * A text as cells, one for each token. It is one stop of the Tab key; arrows move from cell to cell.
 * `onChoose(position)` hears what is pointed at or focused.
 */
export class TokenCells {
  constructor(container, name, onChoose) {
    this.container = container;
    this.onChoose = onChoose;
    this.clear();
    container.classList.add("tokens");
    container.setAttribute("role", "listbox");
    container.setAttribute("aria-label", name);
    container.addEventListener("keydown", (event) => this.move(event));
    for (const kind of ["pointerover", "focusin", "click"]) {
      container.addEventListener(kind, (event) => {
        const place = event.target.closest(".token");
        if (!place) return;
        if (kind === "click") place.focus();
        this.choose(this.places.indexOf(place));
      });
    }
  }

  clear() {
    this.places = [];
    this.current = 0;
    this.container.replaceChildren();
  }

  /** The text at a position, which may be the first behind the last; null is not known yet, `special` a name for it. */
  write(position, text, special = null) {
    if (position === this.places.length) {
      this.places.push(make("span", { role: "option", tabIndex: position ? -1 : 0, ariaSelected: "false" }));
      this.container.append(this.places[position]);
    }
    const place = this.places[position];
    place.dataset.special = special ? "1" : "";
    const shown = special ? [special] : text === null ? ["\u00a0"] : visible(text);
    place.replaceChildren(make("span", { className: "letters" }, ...shown));
    if (text?.endsWith("\n") && place.nextSibling?.tagName !== "BR") place.after(make("br"));
    else if (text?.startsWith("\n") && place.previousSibling && place.previousSibling.tagName !== "BR") place.before(make("br")); // a line end with the indentation behind it
  }

  /** The classes of a cell, and the numbers that may stand below it. */
  paint(position, classes, numbers) {
    const place = this.places[position];
    const look = ["token", ...classes];
    if (place.dataset.special) look.push("special");
    if (place.classList.contains("at")) look.push("at");
    const name = look.join(" ");
    if (place.className !== name) place.className = name;
    Object.assign(place.dataset, numbers);
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
    this.onChoose(position);
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

/** A text whose tokens, BOS first, are coloured by chunk, or by lane where the model writes in lanes. */
export class ChunkText extends TokenCells {
  constructor(container, name, texts, onChoose = () => {}, lanes = []) {
    super(container, name, onChoose);
    this.texts = texts;
    this.lanes = lanes.length ? lanes : null;
    texts.forEach((text, position) => this.write(position, text, position ? null : text));
  }

  /** Chunks of all positions (−1: none yet), which of them are masked, filled just now, or heads of lanes. */
  draw(ids, hidden, isFresh = () => false, isHead = () => false) {
    this.groups = this.lanes ?? ids;
    this.texts.forEach((text, position) => {
      const chunk = ids[position];
      const state = chunk < 0 && !this.lanes ? ["unrouted", "masked"] : hidden[position] ? ["masked"] : [];
      if (isFresh(position)) state.push("fresh");
      if (isHead(position)) state.push("lane-head");
      this.paint(position, [chunkClass(this.groups[position]), ...state], { chunk: chunk < 0 ? "·" : chunk });
      this.places[position].setAttribute("aria-label", `${text}, ${this.where(position, chunk)}${hidden[position] ? ", masked" : ""}`);
    });
  }

  where(position, chunk) {
    const lane = this.lanes?.[position] ? `lane ${this.lanes[position]}, ` : "";
    return `${lane}${chunk < 0 ? "in no chunk yet" : `chunk ${chunk}`}`;
  }

  /** Fade everything outside one chunk or lane; null shows all. */
  single(group) {
    this.container.classList.toggle("single", group !== null);
    this.places.forEach((place, position) => place.classList.toggle("chosen", this.groups[position] === group));
  }
}
