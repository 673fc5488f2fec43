import { chunkClass } from "./dom.js";
import { TokenCells } from "./tokens.js";

/** Bounds of the colours of confidence, lowest first, and what the legend calls them. */
const CONFIDENCE = [0.1, 0.25, 0.5, 0.75, 0.9, Infinity];
export const CONFIDENCE_NAMES = ["under 10 %", "10–25 %", "25–50 %", "50–75 %", "75–90 %", "90 % and over"];
export const ORDERS = 8;

const percent = (p) => (p >= 0.995 && p < 1 ? "over 99 %" : p < 0.005 ? "below 1 %" : `${Math.round(100 * p)} %`);

/** The positions of a recording, filled up to a step. `tell(sentence)` hears about the chosen one. */
export class Canvas extends TokenCells {
  constructor(container, name, tell) {
    super(container, name, () => this.say());
    this.tell = tell;
    this.recording = null;
    this.at = 0;
    this.colours = "chunk";
    container.addEventListener("pointerleave", () => this.leave());
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
    this.clear();
    this.recording = recording;
    this.container.classList.toggle("hundreds", recording.blanks > 99);
    this.grow();
  }

  /** Make cells for positions that the recording has and the canvas has not, and write what is known by now. */
  grow(positions = []) {
    const { cells, special } = this.recording;
    const fill = (position) => {
      const { text, token } = cells[position];
      this.write(position, text, token === null ? null : special[token] || (text === "" ? `#${token}` : null));
    };
    while (this.places.length < cells.length) fill(this.places.length);
    positions.forEach(fill);
  }

  /** The canvas as it was after `at` steps; `fresh` marks what the last of them filled. */
  draw(at, fresh = false) {
    this.at = at;
    this.recording?.cells.forEach((cell, position) => {
      const masked = cell.step > at;
      const look = [masked ? "masked" : cell.given ? "given" : this.colour(cell)];
      const known = this.colours === "lane" ? cell.lane : this.colours === "chunk" && cell.chunk; // in a replay: where it will go
      if (masked && known) look.push("known", this.colour(cell));
      if (cell.lane && at && cell.step === at) look.push("lane-head");
      if (fresh && at && cell.step === at) look.push("fresh");
      if (cell.void && at >= this.recording.steps.length) look.push("void");
      const seen = !masked && !cell.given;
      this.paint(position, look, { forward: seen ? cell.forward : "", chunk: seen ? cell.chunk : "" });
    });
    if (fresh) this.follow();
    if (this.container.matches(":hover, :focus-within")) this.say();
  }

  colour(cell) {
    if (this.colours === "lane" && cell.lane) return chunkClass(cell.lane);
    if (this.colours === "lane" || this.colours === "chunk") return chunkClass(cell.chunk);
    if (this.colours === "order") return `order-${Math.min(ORDERS, 1 + Math.floor(cell.share * ORDERS - 1e-9))}`;
    return `sure-${1 + CONFIDENCE.findIndex((bound) => cell.p < bound)}`;
  }

  say() {
    const sentence = this.describe(this.current);
    this.places[this.current]?.setAttribute("aria-label", sentence);
    this.tell(sentence);
  }

  describe(position) {
    const { cells, steps, special } = this.recording;
    const cell = cells[position];
    const name = cell.token === null ? "" : special[cell.token] || JSON.stringify(cell.text);
    if (cell.given) return `${name} · position ${position} · given`;
    const lane = cell.lane ? [`lane ${cell.lane}`] : [];
    if (cell.step > this.at) return `${["Masked", `position ${position}`, ...lane].join(" · ")}${cell.void ? " · behind the end of the text" : ""}`;
    const window = steps.at(-1).window ? ` of window ${cell.window + 1}` : "";
    const parts = [
      name, `position ${position}`, ...lane, `chunk ${cell.chunk}${window}`, `forward pass ${cell.forward}`,
      `probability ${percent(cell.p)}`, `after ${cell.seconds.toFixed(2)} s`,
    ];
    if (cell.void) parts.push("behind the end of the text, not counted");
    return parts.join(" · ");
  }
}
