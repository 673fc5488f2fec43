import { make } from "./dom.js";

const ROUTINGS = {
  auto: "As this kind of model was trained.",
  "paper-chunk": "Chunks are formed from the tokens filled so far, anew whenever one is full.",
  "paper-step": "Chunks are formed anew after every forward.",
  "appendix-b": "As paper-chunk; filled tokens of later chunks stay hidden until their turn.",
  blocks: "Blocks of equal length, from left to right.",
  adablock: "A block ends where the model is sure that a line ends.",
};
const CACHES = {
  auto: "The exact cache where there is one.",
  exact: "Finished chunks are computed once; the text is the same as without.",
  frozen: "Finished chunks keep the states they had: faster, an approximation.",
  none: "Everything that can be seen is computed with every forward.",
};
const BLOCK = 8;

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

/** The settings of one decoder: only what fits the model. */
export class Decoder {
  constructor(letter, info, commit) {
    this.letter = letter;
    this.info = info;
    this.preset = commit;
    const id = (name) => `${letter}-${name}`.toLowerCase();
    const field = (name, title, control, about, extra) => new Field(name, title, control, about, { id: id(name), extra });

    this.commits = Object.fromEntries(info.commits.map((each) => [each.name, each]));
    this.commitNumber = number({ ariaLabel: "Number of the commit policy", id: id("commit-number"), required: true });
    this.blockNumber = whole({ ariaLabel: "Length of a block", id: id("block-number"), min: 1, value: BLOCK, required: true });
    const routings = info.routings.map((name) => name.split(":")[0]);
    const delimiters = make("input", { type: "text", value: "\\n", spellcheck: false });
    this.fields = {
      commit: field("commit", "Commit", select(Object.keys(this.commits)), "", this.commitNumber),
      lanes: field("lanes", "Lanes", whole({ min: 1, max: 4096, placeholder: info.default_lanes ?? "" }), "Writers at once, and so tokens a forward. 1 is the order of AR."),
      drafts: field("drafts", "Drafts", whole({ min: 0, max: 64, placeholder: info.drafts ?? "" }), "Tokens of each lane that a head guesses ahead; the next forward verifies them. 0 is none."),
      routing: field("routing", "Routing", select([...new Set(routings)]), "", this.blockNumber),
      delimiters: field("delimiters", "Block ends", delimiters, "Tokens a block may end with, separated by spaces; \\n is a line end."),
      delimiter_threshold: field("delimiter_threshold", "Threshold", number({ min: 0, max: 1, value: 0.3, required: true }), "The probability at which such a token ends a block."),
      temperature: field("temperature", "Temperature", number({ min: 0, max: 100, value: 1, required: true }), "0 takes the best token, 1 draws as the model says."),
      top_p: field("top_p", "Top p", number({ min: 0, max: 1, placeholder: "off" }), "Draw from the best tokens that reach this probability."),
      top_k: field("top_k", "Top k", whole({ min: 1, placeholder: "off" }), "Draw from the k best tokens."),
      cache: field("cache", "Cache", select(info.caches), ""),
    };
    const { commit: first, ...rest } = this.fields;
    first.element.classList.add("wide");
    this.fields.routing.element.classList.add("wide");
    this.title = make("h2", {}, "Decoder");
    this.summary = make("span", { className: "summary quiet small" });
    this.element = make("details", { className: "panel decoder", open: true },
      make("summary", {}, this.title, this.summary),
      make("div", { className: "fields" }, first.element, ...Object.values(rest).map((each) => each.element)));
    this.element.addEventListener("input", () => this.refresh());
    this.set(commit);
    first.control.addEventListener("change", () => this.fillNumber());
  }

  /** Choose a commit policy such as "threshold:0.9". */
  set(commit) {
    const [name, value] = commit.split(":");
    if (!Object.hasOwn(this.commits, name)) return;
    this.fields.commit.control.value = name;
    this.fillNumber(value);
  }

  fillNumber(value = null) {
    const { number: usual, least, most, whole: integer } = this.commits[this.fields.commit.control.value];
    this.commitNumber.hidden = usual === null;
    this.commitNumber.step = integer ? "1" : "any";
    this.commitNumber.min = least ?? "";
    this.commitNumber.max = most ?? "";
    this.commitNumber.value = value ?? usual ?? "";
    this.refresh();
  }

  /** Explanations and visibility follow from what is chosen. */
  refresh() {
    const { commit, lanes, drafts, routing, delimiters, delimiter_threshold: threshold, cache } = this.fields;
    lanes.element.hidden = !this.info.lanes;
    drafts.element.hidden = !this.info.drafts;
    commit.about.textContent = this.commits[commit.control.value].about;
    routing.about.textContent = ROUTINGS[routing.control.value] ?? "";
    cache.about.textContent = CACHES[cache.control.value] ?? "";
    routing.element.hidden = routing.control.options.length < 2;
    cache.element.hidden = cache.control.options.length < 2;
    this.blockNumber.hidden = routing.control.value !== "blocks";
    delimiters.element.hidden = threshold.element.hidden = routing.control.value !== "adablock";
    const heat = this.fields.temperature.control.value;
    const writers = lanes.control.value || this.info.default_lanes;
    const order = this.info.lanes ? `${writers} lane${writers == 1 ? "" : "s"}` : this.commit();
    const ahead = this.info.drafts && drafts.control.value !== "0" ? ` with ${drafts.control.value || this.info.drafts} drafts` : "";
    this.summary.textContent = `${order}${ahead}${heat === "1" ? "" : `, temperature ${heat}`}`;
  }

  commit() {
    const name = this.fields.commit.control.value;
    return this.commitNumber.hidden ? name : `${name}:${this.commitNumber.value}`;
  }

  routing() {
    const name = this.fields.routing.control.value;
    return name === "blocks" ? `blocks:${this.blockNumber.value}` : name;
  }

  /** Whether all numbers that are asked for fit; those that do not complain. */
  check() {
    const { commit, lanes, drafts, routing, temperature, top_k: k, top_p: p, delimiter_threshold: threshold } = this.fields;
    const asked = [[commit, this.commitNumber], [routing, this.blockNumber], [threshold, threshold.control]];
    const visible = asked.filter(([field, control]) => !control.hidden && !field.element.hidden);
    const checks = [...visible.map(([field, control]) => field.check(control)), ...[lanes, drafts, temperature, k, p].map((field) => field.check())];
    return checks.every(Boolean);
  }

  /** The request's part. */
  read() {
    const { lanes, drafts, temperature, top_k: k, top_p: p, cache, delimiters, delimiter_threshold: threshold } = this.fields;
    const request = {
      commit: this.commit(),
      routing: this.routing(),
      temperature: valueOf(temperature.control),
      top_k: valueOf(k.control),
      top_p: valueOf(p.control),
      cache: cache.control.value,
    };
    if (this.info.lanes && valueOf(lanes.control) !== null) request.lanes = valueOf(lanes.control);
    if (this.info.drafts && valueOf(drafts.control) !== null) request.drafts = valueOf(drafts.control);
    if (request.routing === "adablock") {
      const ends = delimiters.control.value.split(" ").filter(Boolean);
      request.delimiters = ends.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
      request.delimiter_threshold = valueOf(threshold.control);
    }
    return request;
  }

  static PLAIN = { lanes: "", drafts: "", temperature: "1", top_k: "", top_p: "", cache: "auto", delimiters: "\\n", delimiter_threshold: "0.3" };

  keep(kept) {
    const key = (name) => `${this.letter.toLowerCase()}.${name}`;
    if (this.commit() !== this.preset) kept.set(key("commit"), this.commit());
    if (this.routing() !== "auto") kept.set(key("routing"), this.routing());
    for (const [name, plain] of Object.entries(Decoder.PLAIN)) {
      const { value } = this.fields[name].control;
      if (value !== plain) kept.set(key(name), value);
    }
  }

  restore(kept) {
    const value = (name) => kept.get(`${this.letter.toLowerCase()}.${name}`);
    const [routing, block] = (value("routing") ?? "auto").split(":");
    const choose = (control, wanted) => {
      control.value = wanted;
      if (control.selectedIndex < 0) control.selectedIndex = 0;
    };
    choose(this.fields.routing.control, routing);
    this.blockNumber.value = block ?? BLOCK;
    for (const [name, plain] of Object.entries(Decoder.PLAIN)) {
      const { control } = this.fields[name];
      if (control.tagName === "SELECT") choose(control, value(name) ?? plain);
      else control.value = value(name) ?? plain;
    }
    this.set(this.preset);
    this.set(value("commit") ?? this.preset);
  }
}
