/** Small helpers that every page uses. Text from a model is only ever set as text, never as HTML. */

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
export const colourNumber = (chunk) => (chunk > 0 ? ((chunk - 1) % 8) + 1 : 0);

export const chunkClass = (chunk) => `chunk-${colourNumber(chunk)}`;

export const swatch = (chunk) => make("span", { className: `swatch ${chunkClass(chunk)}` }, String(chunk));

export const many = (count, one, more = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : more}`;

export const stillness = matchMedia("(prefers-reduced-motion: reduce)");
