import { byId, chunkClass, colourNumber, make, swatch } from "./dom.js";
import { scoreBars, signed } from "./scores.js";
import { ChunkText } from "./tokens.js";

const data = JSON.parse(byId("data").textContent);
const { tokens, frames } = data;
const byNoise = data.axis === "noise";
const routed = frames.some((frame) => frame.scores);
const kindNames = { ar: "AR", mdlm: "MDLM", bdlm: "BDLM", dcdm: "DCDM" };
const numFree = tokens.filter((token) => token.free).length;

let frame = frames[data.shown];
let position = 0;
let alone = null;

const text = new ChunkText(byId("tokens"), "Text", tokens.map((token) => token.text), (chosen) => {
  position = chosen;
  showToken();
});

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 1 : 0)}%` : "–");

// --- the slider and what it means --------------------------------------------------------------------------------

function caption() {
  const masked = frame.hidden.reduce((sum, hidden) => sum + hidden, 0);
  if (byNoise) {
    const share = `${masked.toLocaleString("en")} of ${numFree.toLocaleString("en")} tokens are masked.`;
    return `${share} The router sees the others, and sends every token, masked or not, to a chunk. What is masked at one level stays masked at the next.`;
  }
  if (frames.length === 1) return "One chunk holds every token: all are filled in together, in any order.";
  const size = frame.sizes[frame.at - 1];
  const many = `${size} token${size === 1 ? "" : "s"}`;
  if (routed) return `Chunk ${frame.at} takes ${many}. The router chose them seeing chunks 0 to ${frame.at - 1} only: all others were MASK.`;
  return `Chunk ${frame.at}, of ${many}, is filled in, seeing chunks 0 to ${frame.at - 1}. ${data.rule}`;
}

function show(number) {
  frame = frames[number];
  byId("slider").value = number;
  byId("slider-value").textContent = byNoise ? frame.at.toFixed(frame.at * 10 % 1 ? 2 : 1) : `${frame.at} of ${frames.length}`;
  byId("slider").setAttribute("aria-valuetext", byId("slider-value").textContent);
  byId("caption").textContent = caption();
  byId("unrouted-key").hidden = !frame.ids.includes(-1);
  text.draw(frame.ids, frame.hidden);
  text.single(alone);
  showToken();
  showSizes();
  showMask();
  showHeld();
}

// --- one token ---------------------------------------------------------------------------------------------------

function showToken() {
  const token = tokens[position];
  const chunk = frame.ids[position];
  const where = chunk < 0 ? "in no chunk yet" : chunk === 0 ? "always visible" : "in chunk ";
  const name = [make("code", {}, JSON.stringify(token.text)), ` at ${position}, ${where}`];
  if (chunk > 0) name.push(swatch(chunk));
  const state = frame.hidden[position] ? ", MASK" : "";
  name.push(`${state}${token.free ? "" : " · not counted"}`);
  byId("token-name").replaceChildren(...name);
  const scores = frame.scores ? frame.scores[position] : [];
  byId("token-scores").replaceChildren(...(scores.length ? [scoreBars(scores, chunk, data.bias)] : []));
  byId("token-note").textContent = scoreNote(scores, chunk);
}

function scoreNote(scores, chunk) {
  if (!routed) return `${data.rule} There are no scores.`;
  if (!scores.length) return "Always visible: the router is not asked.";
  const bars = `Bars: how far ${data.bias.length ? "r + b" : "r"} lies above (right) or below the token’s mean.`;
  if (byNoise) return `r of each chunk, and the bias b. ${data.rule} ${bars}`;
  const round = chunk > 0 ? chunk : frame.at;
  const mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
  return `r of each chunk, as round ${round} saw it; r of chunk ${round} less the mean is ${signed(scores[round - 1] - mean)}. ${data.rule} ${bars}`;
}

// --- sizes -------------------------------------------------------------------------------------------------------

function showSizes() {
  const shown = frame.sizes;
  const most = Math.max(1, ...shown);
  const rows = shown.map((size, k) => {
    const length = make("span", { className: `length ${chunkClass(k + 1)}` });
    length.style.width = `${(100 * size) / most}%`;
    const row = make("button", { type: "button", className: "size" }, swatch(k + 1), length, String(size), make("span", { className: "quiet" }, percent(size, numFree)));
    row.setAttribute("aria-pressed", String(alone === k + 1));
    row.setAttribute("aria-label", `chunk ${k + 1}: ${size} tokens`);
    row.addEventListener("click", () => {
      alone = alone === k + 1 ? null : k + 1;
      text.single(alone);
      showSizes();
      byId("sizes").children[k].focus();
    });
    return row;
  });
  byId("sizes").replaceChildren(...rows);
}

// --- the mask ----------------------------------------------------------------------------------------------------

/** Whether query q may attend to key k, as `dcdm.masks` defines it. */
const mayAttend = {
  chunk: ({ ids }, q, k) => ids[k] >= 0 && ids[k] <= ids[q],
  noise: ({ hidden }, q, k) => !hidden[k] || q === k,
};

const chosenMask = () => document.querySelector("input[name=mask]:checked").value;

/** Positions in the order in which the mask is drawn: by chunk, or what the router sees before what is MASK. */
function maskOrder() {
  const order = tokens.map((_, at) => at);
  if (!byId("sorted").checked) return order;
  const last = (chunk) => (chunk < 0 ? Infinity : chunk);
  const key = chosenMask() === "chunk" ? (at) => last(frame.ids[at]) : (at) => frame.hidden[at];
  return order.sort((a, b) => (key(a) === key(b) ? a - b : key(a) - key(b)));
}

/** A CSS colour as one number, as an image holds it. */
function pixelOf(colour) {
  const canvas = make("canvas", { width: 1, height: 1 });
  const context = canvas.getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0];
}

function maskColours() {
  const root = getComputedStyle(document.documentElement);
  const colours = { chunks: [] };
  for (const name of ["accent", "accent-soft", "empty"]) colours[name] = pixelOf(root.getPropertyValue(`--${name}`));
  for (let chunk = 0; chunk <= 8; chunk++) {
    const probe = byId("mask-note").appendChild(make("i", { className: chunkClass(chunk) }));
    colours.chunks.push(pixelOf(getComputedStyle(probe).getPropertyValue("--chunk")));
    probe.remove();
  }
  return colours;
}

const strip = Math.max(2, Math.round(tokens.length / 24));

function showMask() {
  const canvas = byId("mask");
  const order = maskOrder();
  const rule = mayAttend[chosenMask()];
  const colours = maskColours();
  const size = order.length + strip + 1;
  canvas.width = canvas.height = size;
  const image = canvas.getContext("2d").createImageData(size, size);
  const pixels = new Uint32Array(image.data.buffer);
  const paint = (x, y, colour) => (pixels[y * size + x] = colour);
  const chunkColour = (at) => (frame.ids[at] < 0 ? colours.empty : colours.chunks[colourNumber(frame.ids[at])]);
  let live = 0;
  order.forEach((query, row) => {
    for (let depth = 0; depth < strip; depth++) {
      paint(depth, row + strip + 1, chunkColour(query));
      paint(row + strip + 1, depth, chunkColour(query));
    }
    order.forEach((key, column) => {
      const allowed = rule(frame, query, key);
      live += allowed;
      const within = allowed && frame.ids[query] === frame.ids[key];
      paint(column + strip + 1, row + strip + 1, within ? colours.accent : allowed ? colours["accent-soft"] : colours.empty);
    });
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  const pairs = order.length ** 2;
  const own = "A token sees its own chunk (dark) and earlier ones (light).";
  const which = chosenMask() === "chunk" ? own : "The router’s block sees what is visible (dark: same chunk), and each MASK itself.";
  byId("mask-note").textContent = `Rows ask, columns are seen; the edges show the chunks. ${which} ${live.toLocaleString("en")} of ${pairs.toLocaleString("en")} pairs are live: ${percent(live, pairs)}.`;
  canvas.setAttribute("aria-label", byId("mask-note").textContent);
}

function pointAtMask(event) {
  const box = byId("mask").getBoundingClientRect();
  const size = tokens.length + strip + 1;
  const [column, row] = [event.clientX - box.left, event.clientY - box.top].map((far) => Math.floor((far / box.width) * size) - strip - 1);
  const order = maskOrder();
  if (!(row in order) || !(column in order)) return;
  const [query, key] = [order[row], order[column]];
  const called = (at) => `${JSON.stringify(tokens[at].text)} at ${at} (${frame.ids[at] < 0 ? "no chunk yet" : `chunk ${frame.ids[at]}`})`;
  const verb = mayAttend[chosenMask()](frame, query, key) ? "sees" : "does not see";
  byId("mask-cell").textContent = `${called(query)} ${verb} ${called(key)}`;
}

// --- what chunks hold --------------------------------------------------------------------------------------------

const held = data.held;

/** The typical tokens of each chunk; of a single window there are too few. */
function showHeld() {
  if (held.windows === 1) return;
  const parts = held.frames.length > 1 ? held.frames[frames.indexOf(frame)] : held.frames[0];
  const typical = parts[Math.min(1, parts.length - 1)];
  const share = (word) => `${percent(word.count * word.share, word.count)} of its ${word.count.toLocaleString("en")} occurrences are here`;
  const codes = (words) => words.map((word) => make("code", { title: share(word) }, word.text.replaceAll(" ", "·")));
  const body = parts[0].sizes.map((size, k) => make("tr", {}, make("th", {}, swatch(k + 1)), make("td", {}, `${size.toLocaleString("en")} (${percent(size, held.tokens)})`), make("td", { className: "words" }, ...codes(typical.words[k]))));
  const name = `typical${typical.which === "all" ? "" : `, ${typical.which}`}`;
  const head = make("tr", {}, make("th", {}, "chunk"), make("th", {}, "tokens"), make("th", { className: "words" }, name));
  byId("held").replaceChildren(make("thead", {}, head), make("tbody", {}, ...body));
  const level = held.frames.length > 1 ? ` at noise level ${frame.at}` : "";
  byId("held-source").textContent = `Over ${held.source}${level}: ${held.tokens.toLocaleString("en")} tokens. Typical are tokens that a chunk holds more often than others do.`;
}

/** What position, token and window alone explain, a row for each noise level and what the router saw. */
function showBits() {
  const names = ["noise", "", "tokens", "bits of chunk", "position alone", "token alone", "window alone", "left", "neighbour", "same chunk", "by chance"];
  const share = (value) => (value === null ? "–" : percent(value, 1));
  const rows = held.frames.flatMap((parts, number) => (parts.length > 1 ? parts.slice(1) : parts).map((one) => {
    const part = (bits, title) => make("td", { title }, `${bits.toFixed(2)} (${one.bits ? percent(bits, one.bits) : "–"})`);
    const [place, token, window, neighbour] = [one.position, one.token, one.window, one.neighbour].map((each) => part(each.bits, `${each.counted.toFixed(2)} counted, ${each.chance.toFixed(2)} after shuffling`));
    const noise = held.frames.length > 1 ? String(frames[number].at) : "–";
    return make("tr", {}, ...[noise, one.which, one.tokens.toLocaleString("en"), one.bits.toFixed(2)].map((text) => make("td", {}, text)), place, token, window, part(one.left, "left to context, to noise, and to several together"), neighbour, ...[one.constant, one.constant_by_chance].map((value) => make("td", {}, share(value))));
  }));
  byId("bits").replaceChildren(make("thead", {}, make("tr", {}, ...names.map((name) => make("th", {}, name)))), make("tbody", {}, ...rows));
}

// --- begin -------------------------------------------------------------------------------------------------------

byId("title").textContent = `Chunks of ${data.model}`;
byId("subtitle").textContent = [
  kindNames[data.kind] + (data.routing ? `, ${data.routing} routing` : ""),
  `${numFree.toLocaleString("en")} tokens and BOS`,
  `${data.num_chunks} chunk${data.num_chunks === 1 ? "" : "s"}`,
].join(" · ");
byId("note").textContent = data.note;
byId("note").hidden = !data.note;
byId("slider-name").textContent = byNoise ? "Noise level" : "Round";
byId("slider").max = frames.length - 1;
byId("slider").disabled = frames.length === 1;
byId("blind").textContent = routed ? "router" : "model";
byId("noise-choice").hidden = !routed;
for (const panel of ["held-panel", "bits-panel"]) byId(panel).hidden = held.windows === 1;
showBits();
byId("slider").addEventListener("input", (event) => show(Number(event.target.value)));
for (const name of ["numbers", "patterns", "covered"]) {
  byId(name).addEventListener("change", (event) => byId("tokens").classList.toggle(name, event.target.checked));
}
byId("mask-choice").addEventListener("change", showMask);
byId("mask").addEventListener("pointermove", pointAtMask);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showMask);
show(data.shown);
text.choose(Math.min(tokens.length - 1, 1 + Math.floor(tokens.length / 3)));
