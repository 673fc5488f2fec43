import { Canvas } from "./canvas.js";
import { make, many } from "./dom.js";
import { Recording } from "./recording.js";
import { denoise } from "./stream.js";

const ENDS = {
  eos: "ended with the end-of-text token",
  length: "filled to its length",
};
const figure = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : value.toPrecision(3).replace(/\.?0+$/, ""));
const number = (value) => value.toLocaleString("en");

/** What a run cost: its name, how it reads from the "done" event, and what it means. */
export const FIGURES = [
  ["tokens/s", (done) => done.tokens_per_second, figure, "new tokens per second, measured by the server"],
  ["forward passes", (done) => done.costs.forwards, number, "passes through the whole network"],
  ["tokens/forward pass", (done) => done.tokens_per_forward, figure, "new tokens for each pass"],
  ["computed", (done) => done.costs.computed, number, "positions that went through the network, summed over the forward passes"],
  ["reused", (done) => done.costs.reused, number, "positions read from the cache instead, summed over the forward passes"],
  ["seconds", (done) => done.seconds, figure, "from the start to the last token, measured by the server"],
];

/** One decoder's run: its canvas and its figures. */
export class RunView {
  constructor(letter, tell) {
    this.letter = letter;
    this.recording = null;
    this.running = false;
    const box = make("div");
    this.name = make("h3", {});
    this.tag = make("span", { className: "quiet small" });
    this.figures = make("dl", { className: "figures" });
    this.costs = make("div", { className: "run-figures" }, make("h3", {}, letter), this.figures);
    this.element = make("div", { className: "run" }, make("div", { className: "run-head" }, this.name, this.tag), box);
    this.canvas = new Canvas(box, `Canvas ${letter}`, tell);
    this.box = box;
    this.clear();
  }

  /** Nothing shown; `why` is said in its place. */
  clear(why = "The text will be filled in here.") {
    this.recording = null;
    this.running = false;
    this.canvas.recording = null;
    this.canvas.clear();
    this.tag.textContent = "";
    this.box.replaceChildren(make("p", { className: "quiet hint" }, why));
    this.figures.replaceChildren();
  }

  get steps() {
    return this.recording?.steps ?? [];
  }

  draw(at, fresh) {
    if (this.recording) this.canvas.draw(Math.min(at, this.steps.length), fresh && at <= this.steps.length);
  }

  /** Send a request to the model that `info` is of; `changed(what)` hears "start", "commit" and "done". */
  async start(request, info, signal, changed) {
    this.running = true;
    try {
      await denoise(request, signal, (name, data) => {
        if (name === "start") {
          this.recording = new Recording(data, info.special_tokens ?? {});
          this.canvas.open(this.recording);
          const routing = data.routing === "auto" ? [] : [data.routing];
          const order = data.lanes ? many(data.lanes, "lane") + (data.drafts ? ` · ${many(data.drafts, "draft")}` : "") : data.commit;
          this.tag.textContent = [...(request.model ? [request.model] : []), ...routing, order, `cache ${data.cache}`].join(" · ");
        } else {
          this.canvas.grow(this.recording.add(name, data));
        }
        if (name === "done") {
          this.running = false;
          this.showFigures();
        }
        changed(name);
      });
    } finally {
      this.running = false;
    }
  }

  /** How far a run has come, in words. */
  get progress() {
    if (!this.recording) return "Waiting for the server …";
    const { filled, blanks, done } = this.recording;
    if (!done) return `${filled} of ${many(blanks, "token")} filled`;
    const { costs, finish_reason: reason, seconds } = done;
    return `${many(costs.new_tokens, "token")} in ${many(costs.forwards, "forward pass", "forward passes")} and ${figure(seconds)} s; ${ENDS[reason] ?? reason}.`;
  }

  /** The figures, with bars against `other` if there are two. */
  showFigures(other = null) {
    const done = this.recording?.done;
    if (!done) return;
    const tiles = FIGURES.map(([name, read, write]) => {
      const tile = make("div", {}, make("dt", {}, ...name.split(/(?<=\/)/).flatMap((part, at) => (at ? [make("wbr"), part] : [part]))), make("dd", {}, write(read(done))));
      if (other) {
        const most = Math.max(read(done), read(other), 1e-9);
        const bar = make("span", { className: "bar", ariaHidden: "true" });
        bar.style.setProperty("--share", read(done) / most);
        tile.append(bar);
      }
      return tile;
    });
    this.figures.replaceChildren(...tiles);
  }
}

/** Two runs in one sentence. */
export function verdict(first, second) {
  const [a, b] = [first.recording?.done, second.recording?.done];
  if (!a || !b) return "";
  const ratio = b.tokens_per_second / Math.max(a.tokens_per_second, 1e-9);
  const speed = Math.abs(ratio - 1) < 0.02 ? "equally fast" : ratio > 1 ? `${figure(ratio)} times as fast` : `${figure(1 / ratio)} times slower`;
  const forwards = many(b.costs.forwards, "forward pass", "forward passes");
  const took = a.costs.forwards === b.costs.forwards ? `${forwards}, as A did,` : `${forwards} where A took ${number(a.costs.forwards)}`;
  const text = a.text === b.text ? "Both wrote the same text." : "The texts differ.";
  return `B took ${took} and was ${speed}, in one run of each. ${text}`;
}
