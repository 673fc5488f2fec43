const SIGNS = { "\n": "↵", "\t": "→", "\r": "␍", " ": "·" };

/**
 * A text whose tokens are coloured by chunk: one stop of the Tab key, arrows go from token to token.
 * `onChoose(position)` hears what is pointed at or focused. Returns draw(ids, hidden) and single(chunk).
 */
function tokenText(container, tokens, onChoose) {
  const places = tokens.map((token, position) => {
    const letters = make("span", { className: "letters" });
    for (const letter of token.text) {
      const sign = SIGNS[letter] ?? (letter < " " ? String.fromCodePoint(0x2400 + letter.codePointAt(0)) : null);
      letters.append(sign ? make("span", { className: "sign" }, sign) : letter);
    }
    const place = make("span", { role: "option", tabIndex: position ? -1 : 0 }, letters);
    container.append(place);
    if (token.text.endsWith("\n")) container.append(make("br"));
    return place;
  });
  let ids = [];
  let current = 0;

  function choose(position) {
    places[current].classList.remove("at");
    places[current].setAttribute("aria-selected", "false");
    places[current].tabIndex = -1;
    current = position;
    places[current].classList.add("at");
    places[current].setAttribute("aria-selected", "true");
    places[current].tabIndex = 0;
    onChoose(position);
  }

  /** The nearest token in the line above (−1) or below (1). */
  function across(direction) {
    const from = places[current].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let best = current;
    let least = Infinity;
    places.forEach((place, position) => {
      const box = place.getBoundingClientRect();
      const down = direction * (box.top - from.top);
      if (down < from.height / 2) return;
      const distance = 1000 * down + Math.abs(box.left + box.width / 2 - middle);
      if (distance < least) [least, best] = [distance, position];
    });
    return best;
  }

  container.addEventListener("keydown", (event) => {
    const last = places.length - 1;
    const goal = {
      ArrowRight: () => Math.min(last, current + 1),
      ArrowLeft: () => Math.max(0, current - 1),
      ArrowDown: () => across(1),
      ArrowUp: () => across(-1),
      Home: () => 0,
      End: () => last,
    }[event.key];
    if (!goal) return;
    event.preventDefault();
    places[goal()].focus();
  });
  places.forEach((place, position) => {
    place.addEventListener("pointerenter", () => choose(position));
    place.addEventListener("focus", () => choose(position));
    place.addEventListener("click", () => place.focus());
  });

  return {
    choose,
    draw(newIds, hidden) {
      ids = newIds;
      places.forEach((place, position) => {
        const chunk = ids[position];
        const special = tokens[position].special ? " special" : "";
        const state = chunk < 0 ? " unrouted masked" : hidden[position] ? " masked" : "";
        const at = position === current && place.classList.contains("at") ? " at" : "";
        place.className = `token ${chunkClass(chunk)}${special}${state}${at}`;
        place.dataset.chunk = chunk < 0 ? "·" : chunk;
        const where = chunk < 0 ? "in no chunk yet" : `chunk ${chunk}`;
        place.setAttribute("aria-label", `${tokens[position].text}, ${where}${hidden[position] ? ", masked" : ""}`);
      });
    },
    /** Fade everything outside one chunk; null shows all. */
    single(chunk) {
      container.classList.toggle("single", chunk !== null);
      places.forEach((place, position) => place.classList.toggle("chosen", ids[position] === chunk));
    },
  };
}
