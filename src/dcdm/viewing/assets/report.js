/** What reports have beside drawings: wide tables, and texts being filled in. */

import { byId, make, many, stillness } from "./dom.js";
import { Player } from "./player.js";
import { scoreBars } from "./scores.js";
import { ChunkText } from "./tokens.js";

const data = JSON.parse(byId("data").textContent) ?? {};

/** A table that is wider than its place says so, fades at its edge, and can be reached with the keyboard. */
function hintAtScrolling(box) {
  const title = box.closest("section")?.querySelector("h2")?.textContent;
  const hint = make("p", { className: "small quiet scroll-hint" }, "More columns: scroll sideways →");
  box.before(hint);
  const look = () => {
    const beyond = box.scrollWidth - box.clientWidth;
    hint.hidden = beyond <= 1;
    box.classList.toggle("cut-off", box.scrollLeft < beyond - 1);
    box.toggleAttribute("tabindex", beyond > 1);
    if (beyond <= 1) return;
    box.tabIndex = 0;
    box.role = "region";
    box.ariaLabel = title ?? "table";
  };
  box.addEventListener("scroll", look);
  new ResizeObserver(look).observe(box);
}

/** The forward that filled each position, 0 where it was given. */
function forwardsOf({ tokens, steps }) {
  const forward = tokens.map(() => 0);
  steps.forEach((positions, number) => positions.forEach((position) => (forward[position] = number + 1)));
  return forward;
}

/** What there is to say of a token: where it lies, when it came, and the scores by which a router chose it. */
function tokenNote({ tokens, chunks, lanes = [], scores, bias = [], rule = "" }, forward, position, at) {
  const token = `${JSON.stringify(tokens[position])} at ${position}`;
  const group = lanes.length ? `lane ${lanes[position]}` : `chunk ${chunks[position]}`;
  if (!forward[position]) return [`${token} was given.`];
  const came = forward[position] > at ? `A blank at ${position}, of ${group}.` : `${token}, ${group}, came with forward ${forward[position]}.`;
  const bars = scores?.[position]?.length ? [scoreBars(scores[position], chunks[position], bias)] : [];
  return [rule ? `${came} ${rule}` : came, ...bars];
}

/**
 * Texts being filled in, forward by forward, by one set of buttons: from the moment they are first seen, unless motion is
 * not wanted. Each may have a label and, if a router chose, its scores.
 */
function fillingReplay(container, fillings, name) {
  const length = Math.max(...fillings.map(({ steps }) => steps.length));
  const controls = make("div", { className: "player", role: "group", ariaLabel: `replay of the ${name}` });
  const columns = make("div", { className: fillings.length > 1 ? "texts" : "" });
  container.append(controls, columns);
  let player = null;
  const texts = fillings.map((filling) => {
    const forward = forwardsOf(filling);
    const { tokens, chunks, steps, label = "", lanes = [] } = filling;
    const box = make("div", { className: "numbers covered filling" });
    const sentence = make("div", { className: "small quiet sentence", ariaLive: "polite" });
    const head = label ? [make("h3", {}, label)] : [];
    columns.append(make("div", { className: "filled" }, ...head, box, sentence));
    const called = label || name;
    const text = new ChunkText(box, called, tokens, (position) => sentence.replaceChildren(...tokenNote(filling, forward, position, player.at)), lanes);
    const draw = (at, moving) => {
      sentence.ariaLive = player?.playing ? "off" : "polite"; // every forward would be too much to listen to
      const newest = (position) => at > 0 && forward[position] === at;
      text.draw(chunks, forward.map((when) => when > at), (position) => moving && newest(position), (position) => lanes.length && newest(position));
      const done = at >= steps.length && fillings.length > 1;
      if (!at) sentence.textContent = "Nothing is filled in yet.";
      else if (done) sentence.textContent = `Done after ${many(steps.length, "forward pass", "forward passes")}.`;
      else sentence.textContent = `Forward ${at} filled ${many(steps[at - 1].length, "token")}.`;
    };
    return { draw };
  });
  const speed = length > 40 ? "10" : length > 10 ? "3" : "1";
  player = new Player(controls, { length: () => length, speed, show: (at, moving) => texts.forEach(({ draw }) => draw(at, moving)) });
  player.go(length);
  if (stillness.matches) return;
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    if (player.at === length && !player.playing) player.open();
  });
  watcher.observe(columns);
}

for (const box of document.querySelectorAll(".scroll")) hintAtScrolling(box);
for (const [id, fillings] of Object.entries(data.fillings ?? {})) fillingReplay(byId(id), fillings, "texts");
