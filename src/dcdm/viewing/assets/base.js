const data = JSON.parse(document.getElementById("data").textContent);

const byId = (id) => document.getElementById(id);

/** An element with properties; children are elements or text, and text is never read as HTML. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Which of the palette's colours a chunk has; more than eight chunks share them in turn. */
const colourNumber = (chunk) => (chunk > 0 ? ((chunk - 1) % 8) + 1 : 0);

const chunkClass = (chunk) => `chunk-${colourNumber(chunk)}`;

const swatch = (chunk) => make("span", { className: `swatch ${chunkClass(chunk)}` }, String(chunk));

const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole / 100 ? 1 : 0)}%` : "–");
