const PAUSE = 900; // milliseconds between forwards

/** A text being filled in, forward by forward: a slider, and a button that moves it. */
function player(container, filling, name) {
  const { tokens, chunks, steps } = filling;
  const forward = tokens.map(() => 0); // which forward filled a position, 0 where it was given
  steps.forEach((positions, number) => positions.forEach((position) => (forward[position] = number + 1)));

  const button = make("button", { type: "button" });
  const slider = make("input", { type: "range", min: 0, max: steps.length, step: 1, ariaLabel: `forwards of the ${name}` });
  const count = make("output");
  const said = make("p", { className: "small quiet said", ariaLive: "polite" });
  const box = make("div", { className: "tokens numbers covered", role: "listbox", ariaLabel: name });
  container.classList.add("player");
  container.append(make("div", { className: "controls" }, button, slider, count), box, said);

  const shown = tokens.map((text, position) => ({ text, special: position === 0 }));
  const text = tokenText(box, shown, (position) => {
    if (!forward[position]) said.textContent = `${JSON.stringify(tokens[position])} at ${position} was given.`;
    else if (forward[position] > at) said.textContent = `A blank at ${position}, of chunk ${chunks[position]}.`;
    else said.textContent = `${JSON.stringify(tokens[position])} at ${position}, chunk ${chunks[position]}, came with forward ${forward[position]}.`;
  });
  let at = steps.length;
  let timer = null;

  function show(number) {
    at = number;
    slider.value = at;
    count.textContent = `${at} of ${steps.length} forwards`;
    slider.setAttribute("aria-valuetext", count.textContent);
    text.draw(chunks, forward.map((when) => when > at));
    Array.from(box.querySelectorAll(".token")).forEach((place, position) =>
      place.classList.toggle("fresh", at > 0 && timer !== null && forward[position] === at));
    const filled = at ? steps[at - 1].length : 0;
    said.textContent = at ? `Forward ${at} filled ${filled} byte${filled === 1 ? "" : "s"}.` : "Nothing is filled in yet.";
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    button.textContent = "▶ Play";
  }

  function play() {
    button.textContent = "❚❚ Pause";
    timer = setInterval(() => {
      show(at + 1);
      if (at === steps.length) stop();
    }, PAUSE);
    show(at === steps.length ? 0 : at);
  }

  button.addEventListener("click", () => (timer === null ? play() : stop()));
  slider.addEventListener("input", () => {
    stop();
    show(Number(slider.value));
  });
  stop();
  show(at);
}
