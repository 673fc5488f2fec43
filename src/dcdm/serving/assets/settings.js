import { make, many } from "./dom.js";

/** A labelled control with one line about it and room for an error. */
export class Field {
  constructor(name, title, control, about, { id = name, extra = null } = {}) {
    this.name = name;
    this.control = control;
    control.id = id;
    control.setAttribute("aria-describedby", `${id}-about ${id}-error`);
    this.about = make("p", { className: "about", id: `${id}-about` }, about);
    this.error = make("p", { className: "error", id: `${id}-error`, hidden: true });
    const label = make("label", { htmlFor: id }, title);
    const tick = control.type === "checkbox";
    const row = tick ? make("div", { className: "tick" }, control, label) : make("div", { className: "row" }, control, ...(extra ? [extra] : []));
    this.element = make("div", { className: "field" }, ...(tick ? [row] : [label, row]), this.error, this.about);
  }

  complain(message, control = this.control) {
    this.error.textContent = message;
    this.error.hidden = !message;
    if (message) control.setAttribute("aria-invalid", "true");
    else this.element.querySelectorAll("[aria-invalid]").forEach((each) => each.removeAttribute("aria-invalid"));
    return control;
  }

  /** Whether the number in `control` is one that fits; complains if not. */
  check(control = this.control) {
    const fault = faultOf(control);
    if (fault) this.complain(fault, control);
    return !fault;
  }
}

/** What is wrong with a number, in words; "" if nothing is. */
function faultOf(control) {
  if (control.validity.badInput) return "This is not a number.";
  if (control.value === "") return control.required ? "A number is needed here." : "";
  const value = control.valueAsNumber;
  const [least, most] = [control.min, control.max].map((bound) => (bound === "" ? null : Number(bound)));
  if ((least !== null && value < least) || (most !== null && value > most)) {
    return most === null ? `This must be at least ${least}.` : `This must be between ${least} and ${most}.`;
  }
  return control.step === "1" && !Number.isInteger(value) ? "This must be a whole number." : "";
}

/** The number in a control, null where it is empty. */
const valueOf = (control) => (Number.isNaN(control.valueAsNumber) ? null : control.valueAsNumber);

const number = (properties) => make("input", { type: "number", step: "any", inputMode: "decimal", ...properties });
const whole = (properties) => make("input", { type: "number", step: "1", inputMode: "numeric", ...properties });
const select = (values) => make("select", {}, ...values.map((value) => make("option", { value }, value)));

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

/** What both decoders share beside the prompt: length, seed, where to end. */
export class Shared {
  constructor(container, info) {
    const most = info.limits?.max_tokens;
    const length = whole({ min: 1, max: most ?? "", placeholder: "auto" });
    this.fields = {
      max_tokens: new Field("max_tokens", "Length", length, `Tokens behind the prompt${most ? `, at most ${most}` : ""}. Empty: none if there are blanks, else one window.`),
      seed: new Field("seed", "Seed", whole({ min: 0, max: 2 ** 53 - 1, value: 0, required: true }), "Same seed and settings, same text; two decoders share the random numbers."),
      stop_at_eos: new Field("stop_at_eos", "End at the end-of-text token", make("input", { type: "checkbox", checked: true }), "Otherwise the whole length is filled."),
    };
    container.append(...Object.values(this.fields).map((field) => field.element));
  }

  /** Whether all numbers fit; those that do not complain. */
  check() {
    return [this.fields.max_tokens.check(), this.fields.seed.check()].every(Boolean);
  }

  /** The request's part. */
  read() {
    const { max_tokens: length, seed, stop_at_eos: end } = this.fields;
    return { max_tokens: valueOf(length.control), seed: valueOf(seed.control), stop_at_eos: end.control.checked };
  }

  keep(kept) {
    if (this.fields.max_tokens.control.value !== "") kept.set("length", this.fields.max_tokens.control.value);
    if (this.fields.seed.control.value !== "0") kept.set("seed", this.fields.seed.control.value);
    if (!this.fields.stop_at_eos.control.checked) kept.set("eos", "0");
  }

  restore(kept) {
    this.fields.max_tokens.control.value = kept.get("length") ?? "";
    this.fields.seed.control.value = kept.get("seed") ?? "0";
    this.fields.stop_at_eos.control.checked = kept.get("eos") !== "0";
  }
}

/** A setting as the address keeps it: texts with spaces between them. */
function textOf(value) {
  const texts = value === null ? [] : [value].flat();
  return texts.map((text) => String(text).replaceAll("\n", "\\n").replaceAll("\t", "\\t")).join(" ");
}

function controlOf({ type, choices, least, most, default: usual, means }) {
  if (type === "choice") return select(choices.map((each) => each.name));
  if (type === "texts") return make("input", { type: "text", spellcheck: false });
  const properties = { min: least ?? "", max: most ?? "", required: usual !== null, placeholder: usual === null ? means ?? "off" : "" };
  return type === "integer" ? whole(properties) : number(properties);
}

/** A setting of a decoder, as /v1/models describes it: a choice, perhaps with a number, or a number, or texts. */
class Dial extends Field {
  constructor(setting, letter, preset) {
    const id = `${letter}-${setting.name}`.toLowerCase();
    const title = (setting.name[0].toUpperCase() + setting.name.slice(1)).replaceAll("_", " ");
    const takesNumber = setting.choices?.some((each) => each.number !== null);
    const extra = takesNumber ? number({ ariaLabel: `${title}: its number`, id: `${id}-number`, required: true }) : null;
    super(setting.name, title, controlOf(setting), setting.about, { id, extra });
    Object.assign(this, { setting, extra, preset });
    if (extra) this.element.classList.add("wide");
    this.set(preset);
    this.control.addEventListener("change", () => this.fillNumber());
  }

  /** A text such as "threshold:0.9", "0.5" or "\n ."; what is not among the choices changes nothing. */
  set(text) {
    if (!this.setting.choices) this.control.value = text;
    const [name, value] = text.split(":");
    if (!this.setting.choices?.some((each) => each.name === name)) return;
    this.control.value = name;
    this.fillNumber(value);
  }

  get chosen() {
    return this.setting.choices?.find((each) => each.name === this.control.value);
  }

  fillNumber(value = null) {
    if (!this.extra) return;
    const { number: usual, least, most, whole: integer } = this.chosen;
    this.extra.hidden = usual === null;
    this.extra.step = integer ? "1" : "any";
    this.extra.min = least ?? "";
    this.extra.max = most ?? "";
    this.extra.value = value ?? usual ?? "";
  }

  get text() {
    const { value } = this.control;
    return this.extra && !this.extra.hidden ? `${value}:${this.extra.value}` : value;
  }

  /** As the request has it; null where nothing is asked for. */
  get value() {
    if (this.setting.type === "choice") return this.text;
    if (this.setting.type !== "texts") return valueOf(this.control);
    return this.control.value.split(" ").filter(Boolean).map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  }

  check() {
    const numbers = [this.control, this.extra].filter((each) => each?.type === "number" && !each.hidden);
    return numbers.map((each) => super.check(each)).every(Boolean);
  }
}

/** One decoder: which model, and the settings that fit it. */
export class Decoder {
  /** `served` maps models' names to what they can do; `commitOf(info)` is the policy that this decoder begins with. */
  constructor(letter, served, commitOf) {
    Object.assign(this, { letter, served, commitOf });
    this.pick = new Field("model", `Model ${letter}`, select(Object.keys(served)), "", { id: `${letter}-model`.toLowerCase() });
    this.title = make("h2", {}, "Decoder");
    this.summary = make("span", { className: "summary quiet small" });
    this.dials = make("div", { className: "fields" });
    this.element = make("details", { className: "panel decoder", open: true }, make("summary", {}, this.title, this.summary), this.dials);
    this.element.addEventListener("input", () => this.refresh());
    this.element.addEventListener("change", () => this.refresh());
    this.use(Object.keys(served)[0]);
  }

  get info() {
    return this.served[this.model];
  }

  /** Take a model of the server; a name that it does not know changes nothing. */
  use(name) {
    if (!this.served[name] || name === this.model) return;
    this.model = this.pick.control.value = name;
    this.pick.about.textContent = this.info.described;
    const preset = ({ name, default: usual }) => (name === "commit" ? this.commitOf(this.info) : textOf(usual));
    this.fields = Object.fromEntries(this.info.settings.map((each) => [each.name, new Dial(each, this.letter, preset(each))]));
    this.dials.replaceChildren(...Object.values(this.fields).map((each) => each.element));
    this.refresh();
  }

  get several() {
    return Object.keys(this.served).length > 1;
  }

  /** Explanations and visibility follow from what is chosen. */
  refresh() {
    for (const dial of Object.values(this.fields)) {
      const { choices, only_with: needs, about } = dial.setting;
      dial.about.textContent = dial.chosen?.about ?? about;
      dial.element.hidden = choices?.length < 2 || (needs !== null && this.fields[needs[0]].control.value !== needs[1]);
    }
    const { lanes, drafts, commit, temperature } = this.fields;
    const meant = (dial) => dial.value ?? dial.setting.means;
    const order = lanes ? many(meant(lanes), "lane") : commit.value;
    const ahead = drafts && meant(drafts) ? ` with ${meant(drafts)} drafts` : "";
    this.summary.textContent = `${order}${ahead}${temperature.text === "1" ? "" : `, temperature ${temperature.text}`}`;
  }

  get visible() {
    return Object.values(this.fields).filter((dial) => !dial.element.hidden);
  }

  /** Whether all numbers that are asked for fit; those that do not complain. */
  check() {
    return this.visible.map((dial) => dial.check()).every(Boolean);
  }

  /** The request's part. */
  read() {
    const given = this.visible.map((dial) => [dial.name, dial.value]);
    return { ...(this.several ? { model: this.model } : {}), ...Object.fromEntries(given.filter(([, value]) => value !== null)) };
  }

  keep(kept) {
    if (this.several) kept.set(`${this.letter.toLowerCase()}.model`, this.model);
    for (const dial of Object.values(this.fields)) {
      if (dial.text !== dial.preset) kept.set(`${this.letter.toLowerCase()}.${dial.name}`, dial.text);
    }
  }

  restore(kept) {
    this.use(kept.get(`${this.letter.toLowerCase()}.model`) ?? Object.keys(this.served)[0]);
    for (const dial of Object.values(this.fields)) {
      dial.set(dial.preset);
      dial.set(kept.get(`${this.letter.toLowerCase()}.${dial.name}`) ?? dial.preset);
    }
    this.refresh();
  }
}
