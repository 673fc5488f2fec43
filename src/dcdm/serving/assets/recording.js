/** What one run of a decoder did: its positions and its forward passes in the order in which they came. */

export class Recording {
  /** `special` maps tokens that are not text, such as BOS, to their names. */
  constructor(start, special = {}) {
    this.start = start;
    this.special = special;
    /** One per position: {text, token, given, step, chunk, lane, forward, window, p, share, seconds}; step 0 where given. */
    this.cells = [];
    /** One per forward pass that committed something: {positions, forward, window, chunk, seconds}. */
    this.steps = [];
    this.done = null;
    this.filled = 0;
    this.before = 0; // forward passes of earlier windows
    this.window = 0;
    for (const { position, token, text, given, lane } of start.canvas) {
      this.cells[position] = { token, text, given, lane, step: given ? 0 : Infinity };
    }
    this.blanks = this.cells.filter((cell) => !cell.given).length;
  }

  /** Take in an event of the stream; returns the positions whose text is new. */
  add(name, data) {
    if (name === "commit") return this.commit(data);
    if (name === "done") this.finish(data);
    return [];
  }

  commit({ window, forward, chunk, positions, tokens, texts, logprobs, seconds, lanes }) {
    if (window > this.window) {
      this.window = window;
      this.before = this.steps.at(-1)?.forward ?? 0;
    }
    const number = this.before + forward;
    this.steps.push({ positions, forward: number, window, chunk, seconds });
    this.filled += positions.length;
    positions.forEach((position, at) => {
      this.cells[position] = {
        token: tokens[at], text: texts[at], given: false, step: this.steps.length, chunk, lane: lanes?.[at], forward: number, window,
        p: Math.exp(logprobs[at]), share: this.filled / this.blanks, seconds,
      };
    });
    return positions;
  }

  /** Whatever stands behind the end of the text, filled or not, does not count. */
  finish(data) {
    this.done = data;
    if (data.finish_reason !== "eos") return;
    const behind = this.cells.findLastIndex((cell) => cell.given); // an end that stands in a blank ends nothing
    const end = this.cells.findIndex((cell, at) => at > behind && cell.token !== null && this.special[cell.token]);
    if (end < 0) return;
    this.cells.forEach((cell, position) => (cell.void = position > end));
  }
}
