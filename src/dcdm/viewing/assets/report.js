/** What reports have beside drawings: wide tables, texts divided into chunks, and texts being filled in. */

import { data } from "./data.js";
import { byId, make, many, stillness } from "./dom.js";
import { Player } from "./player.js";
import { ChunkText } from "./tokens.js";

/** Texts as models divide them, each under its name and a sentence about it. */
function chunkTexts(container, views) {
  for (const { name, rule, tokens, ids, hidden } of views) {
    const box = make("div", { className: "numbers" });
    new ChunkText(box, `chunks of the ${name}`, tokens).draw(ids, hidden ?? ids.map(() => false));
    container.append(make("div", {}, make("h3", {}, name), make("p", { className: "small quiet" }, rule), box));
  }
}

/** A table that is wider than its place says so, fades where it goes on, and can be reached with the keyboard. */
function hintAtScrolling(box) {
  const title = box.closest("section")?.querySelector("h2")?.textContent;
  const hint = make("p", { className: "small quiet scroll-hint" }, "The table goes on: scroll it sideways →");
  box.before(hint);
  const look = () => {
    const beyond = box.scrollWidth - box.clientWidth;
    hint.hidden = beyond <= 1;
    box.classList.toggle("goes-on", box.scrollLeft < beyond - 1);
    box.toggleAttribute("tabindex", beyond > 1);
    if (beyond <= 1) return;
    box.tabIndex = 0;
    box.role = "region";
    box.ariaLabel = title ?? "table";
  };
  box.addEventListener("scroll", look);
  new ResizeObserver(look).observe(box);
}

/** A text being filled in, forward by forward: from the moment it is first seen, unless motion is not wanted. */
function fillingReplay(container, { tokens, chunks, steps, lanes = [] }, name) {
  const forward = tokens.map(() => 0); // which forward filled a position, 0 where it was given
  steps.forEach((positions, number) => positions.forEach((position) => (forward[position] = number + 1)));
  const controls = make("div", { className: "player", role: "group", ariaLabel: `replay of the ${name}` });
  const box = make("div", { className: "numbers covered filling" });
  const sentence = make("p", { className: "small quiet sentence", ariaLive: "polite" });
  container.append(controls, box, sentence);

  const text = new ChunkText(box, name, tokens, (position) => {
    const token = `${JSON.stringify(tokens[position])} at ${position}`;
    const group = lanes.length ? `lane ${lanes[position]}` : `chunk ${chunks[position]}`;
    if (!forward[position]) sentence.textContent = `${token} was given.`;
    else if (forward[position] > player.at) sentence.textContent = `A blank at ${position}, of ${group}.`;
    else sentence.textContent = `${token}, ${group}, came with forward ${forward[position]}.`;
  }, lanes);
  let player = null;
  player = new Player(controls, {
    length: () => steps.length,
    speed: "1",
    show: (at, moving) => {
      sentence.ariaLive = player?.playing ? "off" : "polite"; // every forward would be too much to listen to
      const newest = (position) => at > 0 && forward[position] === at;
      text.draw(chunks, forward.map((when) => when > at), (position) => moving && newest(position), (position) => lanes.length && newest(position));
      sentence.textContent = at ? `Forward ${at} filled ${many(steps[at - 1].length, "token")}.` : "Nothing is filled in yet.";
    },
  });
  player.go(steps.length);
  if (stillness.matches) return;
  const watcher = new IntersectionObserver((entries) => {
    if (!entries.some((entry) => entry.isIntersecting)) return;
    watcher.disconnect();
    if (player.at === steps.length && !player.playing) player.open();
  });
  watcher.observe(box);
}

for (const box of document.querySelectorAll(".scroll")) hintAtScrolling(box);
for (const id of ["chunks", "texts"]) if (byId(id)) chunkTexts(byId(id), data[id]);
for (const [name, filling] of Object.entries(data.fillings ?? {})) fillingReplay(byId(name), filling, name);
