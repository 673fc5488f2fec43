/** What reports have beside tables and drawings: texts divided into chunks, and texts being filled in. */

import { data } from "./data.js";
import { byId, make, many } from "./dom.js";
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

/** A text being filled in, forward by forward. */
function fillingReplay(container, { tokens, chunks, steps }, name) {
  const forward = tokens.map(() => 0); // which forward filled a position, 0 where it was given
  steps.forEach((positions, number) => positions.forEach((position) => (forward[position] = number + 1)));
  const controls = make("div", { className: "player", role: "group", ariaLabel: `replay of the ${name}` });
  const box = make("div", { className: "numbers covered filling" });
  const sentence = make("p", { className: "small quiet sentence", ariaLive: "polite" });
  container.append(controls, box, sentence);

  const text = new ChunkText(box, name, tokens, (position) => {
    const token = `${JSON.stringify(tokens[position])} at ${position}`;
    if (!forward[position]) sentence.textContent = `${token} was given.`;
    else if (forward[position] > player.at) sentence.textContent = `A blank at ${position}, of chunk ${chunks[position]}.`;
    else sentence.textContent = `${token}, chunk ${chunks[position]}, came with forward ${forward[position]}.`;
  });
  const player = new Player(controls, {
    length: () => steps.length,
    speed: "1",
    show: (at, moving) => {
      text.draw(chunks, forward.map((when) => when > at), (position) => moving && at > 0 && forward[position] === at);
      sentence.textContent = at ? `Forward ${at} filled ${many(steps[at - 1].length, "byte")}.` : "Nothing is filled in yet.";
    },
  });
  player.go(steps.length);
}

for (const id of ["chunks", "texts"]) if (byId(id)) chunkTexts(byId(id), data[id]);
for (const [name, filling] of Object.entries(data.fillings ?? {})) fillingReplay(byId(name), filling, name);
