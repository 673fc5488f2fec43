/** Texts as models divide them, each under its name and a sentence about it. */
function chunkTexts(container, views) {
  for (const { name, rule, tokens, ids, hidden } of views) {
    const box = make("div", { className: "tokens numbers", role: "listbox", ariaLabel: `chunks of the ${name}` });
    const shown = tokens.map((text, position) => ({ text, special: position === 0 }));
    tokenText(box, shown, () => {}).draw(ids, hidden ?? ids.map(() => false));
    container.append(make("div", {}, make("h3", {}, name), make("p", { className: "small quiet" }, rule), box));
  }
}
