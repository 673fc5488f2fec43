/** What the demo's page has: wide tables, and a text being filled in. */

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
function tokenNote({ tokens, chunks, scores, bias, rule }, forward, position, at) {
  const token = `${JSON.stringify(tokens[position])} at ${position}`;
  const group = `chunk ${chunks[position]}`;
  if (!forward[position]) return [`${token} was given.`];
  const came = forward[position] > at ? `A blank at ${position}, of ${group}.` : `${token}, ${group}, came with forward ${forward[position]}.`;
  const bars = scores?.[position]?.length ? [scoreBars(scores[position], chunks[position], bias)] : [];
  return [`${came} ${rule}`, ...bars];
}

/** A text being filled in, forward by forward: from the moment it is first seen, unless motion is not wanted. */
function fillingReplay(container, filling) {
  const forward = forwardsOf(filling);
  const { tokens, chunks, steps } = filling;
  const controls = make("div", { className: "player", role: "group", ariaLabel: "replay of the text" });
  const box = make("div", { className: "numbers covered filling" });
  const sentence = make("div", { className: "small quiet sentence", ariaLive: "polite" });
  container.append(controls, make("div", { className: "filled" }, box, sentence));
  let player = null;
  const text = new ChunkText(box, "text", tokens, (position) => sentence.replaceChildren(...tokenNote(filling, forward, position, player.at)));
  const show = (at, moving) => {
    sentence.ariaLive = player?.playing ? "off" : "polite"; // every forward would be too much to listen to
    text.draw(chunks, forward.map((when) => when > at), (position) => moving && at > 0 && forward[position] === at);
    sentence.textContent = at ? `Forward ${at} filled ${many(steps[at - 1].length, "token")}.` : "Nothing is filled in yet.";
  };
  const length = steps.length;
  player = new Player(controls, { length: () => length, speed: length > 40 ? "10" : length > 10 ? "3" : "1", show });
  player.go(length);
  if (stillness.matches) return;
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    if (player.at === length && !player.playing) player.open();
  });
  watcher.observe(container);
}

for (const box of document.querySelectorAll(".scroll")) hintAtScrolling(box);
if (data.filling) fillingReplay(byId("viewer"), data.filling);
