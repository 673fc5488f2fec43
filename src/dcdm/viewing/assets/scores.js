import { chunkClass, make, swatch } from "./dom.js";

/** r of a token, one bar for each chunk: how far r, with its bias, lies above or below the token's mean. */
export function scoreBars(scores, own, bias = []) {
  const decides = scores.map((score, k) => score + (bias[k] ?? 0));
  const mean = decides.reduce((sum, value) => sum + value, 0) / decides.length;
  const most = Math.max(1e-12, ...decides.map((value) => Math.abs(value - mean)));
  const grid = make("div", { className: "scores scroll" });
  scores.forEach((score, k) => {
    const chunk = k + 1;
    const length = (50 * Math.abs(decides[k] - mean)) / most;
    const bar = make("i");
    bar.style.width = `${length}%`;
    bar.style.left = `${decides[k] < mean ? 50 - length : 50}%`;
    const name = `value${chunk === own ? " own" : ""}`;
    grid.append(
      swatch(chunk),
      make("span", { className: `track ${chunkClass(chunk)}` }, bar),
      make("span", { className: name }, score.toFixed(3)),
      make("span", { className: name }, bias.length ? signed(bias[k]) : ""),
    );
  });
  return grid;
}

export const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(3);
