for (const { name, rule, tokens, ids } of data.chunks) {
  const box = make("div", { className: "tokens numbers", role: "listbox", ariaLabel: `chunks of the ${name}` });
  const shown = tokens.map((text, position) => ({ text, special: position === 0 }));
  tokenText(box, shown, () => {}).draw(ids, ids.map(() => false));
  byId("chunks").append(make("div", {}, make("h3", {}, name), make("p", { className: "small quiet" }, rule), box));
}

for (const name of Object.keys(data.fillings)) player(byId(name), data.fillings[name], name);
