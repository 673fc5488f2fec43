/** Small helpers that every part of the page uses. Text from a model is only ever set as text, never as HTML. */

export const byId = (id) => document.getElementById(id);

/** An element with properties or attributes; children are elements or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Which of the palette's colours a chunk has; more than eight chunks share them in turn. */
export const chunkClass = (chunk) => `chunk-${chunk > 0 ? ((chunk - 1) % 8) + 1 : 0}`;

export const stillness = matchMedia("(prefers-reduced-motion: reduce)");

export const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

/** Radio buttons in a fieldset; returns value() and set(value). `onChange` hears what the user chooses. */
export function choice(fieldset, name, options, onChange) {
  const inputs = Object.entries(options).map(([value, title]) => {
    const input = make("input", { type: "radio", name, value });
    input.addEventListener("change", () => onChange(value));
    fieldset.append(make("label", {}, input, make("span", {}, title)));
    return input;
  });
  const set = (value) => inputs.forEach((input) => (input.checked = input.value === value));
  set(inputs[0].value);
  return { value: () => inputs.find((input) => input.checked).value, set };
}
