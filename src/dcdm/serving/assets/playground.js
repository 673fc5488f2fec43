/** The playground: a form, one or two runs, a player for both. */

import { CONFIDENCE_NAMES, ORDERS } from "./canvas.js";
import { FORMS, written } from "./code.js";
import { byId, make, many, stillness, swatch } from "./dom.js";
import { Player } from "./player.js";
import { clearProblems, showProblem } from "./problems.js";
import { FIGURES, RunView, verdict } from "./run_view.js";
import { choice, Decoder, Shared } from "./settings.js";
import { models } from "./stream.js";

const CAREFUL = "0.5"; // the temperature of examples: small models write better if they stay with what they are surer of
const BLANK = /\[\[(\d+)\]\]/g;

async function begin() {
  let served;
  try {
    served = await models();
  } catch (problem) {
    byId("model").textContent = "No model.";
    showProblem(problem, () => location.reload());
    return;
  }
  const playground = new Playground(Object.fromEntries(served.map(({ id, dcdm }) => [id, dcdm])));
  if (location.hash.length < 2 && !stillness.matches) playground.greet();
}

/** What a model is, in a line. */
function facts(name, info) {
  const parts = [info.described, `${info.parameters.toLocaleString("en")} parameters`, many(info.context_length, "token") + " of context"];
  if (info.num_chunks) parts.push(many(info.num_chunks, "chunk"));
  return make("span", { className: "fact" }, make("strong", {}, name), ` · ${parts.join(" · ")}`);
}

class Playground {
  /** `served` maps the names of the server's models to what they can do. */
  constructor(served) {
    const infos = Object.values(served);
    this.served = served;
    this.names = Object.keys(served);
    byId("code-about").textContent = infos[0].folder
      ? "For the shell and for Python, on the machine that serves the model."
      : "For the shell and for Python, the model's name stands for the folder it was served from.";
    this.shared = new Shared(byId("shared"), infos[0]);
    const commitOf = (info) => info.settings.find((each) => each.name === "commit");
    this.decoders = [new Decoder("A", served, (info) => commitOf(info).means), new Decoder("B", served, (info) => contrast(commitOf(info)))];
    byId("decoders").append(...this.decoders.map((each) => each.element));
    byId("models").append(...this.decoders.map((each) => each.pick.element));
    byId("models").hidden = this.names.length < 2;
    byId("compare-name").textContent = this.names.length > 1 ? "Compare two models or decoders" : "Compare two decoders";
    const tell = (sentence) => (byId("token").textContent = sentence);
    this.runs = ["A", "B"].map((letter) => new RunView(letter, tell));
    byId("runs").append(...this.runs.map((run) => run.element));
    byId("figures").append(...this.runs.map((run) => run.costs));
    this.abort = null;
    this.requests = null; // of the run that is shown
    this.followed = false; // whether the page went down to the canvas with it
    this.revealing = null;

    this.player = new Player(byId("player"), {
      length: () => Math.max(...this.shown().map((run) => run.steps.length)),
      time: (step) => Math.max(...this.shown().map((run) => run.steps[step - 1]?.seconds ?? 0)),
      live: () => this.abort !== null,
      show: (at, moving) => this.runs.forEach((run) => run.draw(at, moving)),
    });
    const lanes = infos.some((info) => info.lanes) ? { lane: "lane" } : {};
    this.colours = choice(byId("colours"), "colours", { ...lanes, chunk: "chunk", confidence: "confidence", order: "order" }, () => this.look());
    this.numbers = choice(byId("numbers"), "numbers", { forward: "forward pass", chunk: "chunk", off: "none" }, () => this.look());
    this.languages = choice(byId("languages"), "languages", FORMS, () => this.code());
    this.which = choice(byId("which"), "which", { 0: "A", 1: "B" }, () => this.code());
    this.wire();
    this.restore();
    addEventListener("hashchange", () => location.hash.slice(1) !== this.kept && this.restore());
  }

  get comparing() {
    return byId("compare").checked;
  }

  shown() {
    return this.comparing ? this.runs : [this.runs[0]];
  }

  /** The model of decoder A, which examples and colours follow. */
  get info() {
    return this.decoders[0].info;
  }

  get plainColours() {
    return this.info.lanes ? "lane" : "chunk";
  }

  /** What to try; with several models the last one compares two of them. */
  get examples() {
    const own = this.info.examples ?? [];
    if (this.names.length < 2 || !own.length) return own;
    return [...own.filter((each) => !each.compare), { ...own[0], name: "Compare two models", compare: true }];
  }

  /** What the page shows of the chosen models. */
  introduce() {
    const chosen = [...new Set(this.decoders.slice(0, this.comparing ? 2 : 1).map((each) => each.model))];
    byId("model").replaceChildren(...chosen.flatMap((name, at) => (at ? [make("br"), facts(name, this.served[name])] : [facts(name, this.served[name])])));
    byId("about").textContent = chosen.map((name) => this.served[name].about).filter(Boolean).join(" ");
    byId("about").hidden = !byId("about").textContent;
    document.title = `${chosen.join(", ")} · DCDM playground`;
    const chips = this.examples.map((example) => {
      const chip = make("button", { type: "button", className: "chip" }, example.name);
      chip.addEventListener("click", () => {
        if (this.abort) return;
        this.restore(this.settingsOf(example));
        this.generate();
      });
      return chip;
    });
    byId("examples").replaceChildren(byId("examples").firstChild, ...chips);
    byId("examples").hidden = !chips.length;
  }

  /** Another model: its examples and colours, and its first example where the prompt was another model's. */
  modelChosen(decoder) {
    const known = this.names.flatMap((name) => this.served[name].examples ?? []).some(({ prompt }) => prompt === byId("prompt").value);
    decoder.use(decoder.pick.control.value);
    const [example] = this.examples;
    if (decoder === this.decoders[0] && known && example && !this.comparing) this.restore(this.settingsOf(example));
    if (decoder === this.decoders[0]) this.colours.set(this.plainColours);
    this.layout();
    this.look();
  }

  /** The first example plays when the page opens; where the canvas is out of sight, again once one comes to it. */
  greet() {
    if (!this.examples.length) return;
    this.generate();
    clearTimeout(this.revealing);
    this.followed = true; // nobody asked for it: the page stays where it is
    const watcher = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) return;
      watcher.disconnect();
      if (!this.abort && !this.player.playing && !this.player.touched) this.player.open();
    }, { threshold: 0.5 });
    watcher.observe(byId("runs"));
  }

  wire() {
    this.decoders.forEach((each) => each.pick.control.addEventListener("change", () => this.modelChosen(each)));
    byId("figures-about").append(...FIGURES.map(([name, , , about]) => make("div", {}, make("dt", {}, name), make("dd", {}, about))));
    byId("insert").addEventListener("click", () => {
      const area = byId("prompt");
      area.setRangeText("[[8]]", area.selectionStart, area.selectionEnd, "end");
      this.prompt(area.value);
      area.focus();
    });
    byId("form").addEventListener("input", () => this.settingsChanged());
    byId("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.abort) this.generate();
    });
    byId("stop").addEventListener("click", () => this.abort?.abort());
    byId("compare").addEventListener("change", () => this.layout());
    byId("copy").addEventListener("click", () => this.copy());
    byId("runs").addEventListener("keydown", (event) => this.player.key(event, false));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !this.abort) this.generate();
      if (event.key === "Escape") this.abort?.abort();
    });
    if (innerWidth < 768) this.decoders.forEach((each) => (each.element.open = false));
  }

  /** An example as the address would keep it; two decoders write in AR's order and in lanes, or position by position and by chunk. */
  settingsOf({ prompt, length, compare }) {
    const kept = new URLSearchParams({ prompt, "a.temperature": CAREFUL, "a.model": this.decoders[0].model });
    if (length) kept.set("length", length);
    if (!compare) return kept;
    kept.set("compare", "1");
    kept.set("b.temperature", CAREFUL);
    if (this.names.length > 1) {
      const other = this.names.find((name) => name !== this.decoders[0].model);
      kept.set("b.model", other);
      kept.set("b.commit", this.served[other].settings.find((each) => each.name === "commit").means); // each by its own default
    } else if (this.info.lanes) kept.set("a.lanes", "1");
    else if (this.decoders[0].fields.commit.preset !== "position") kept.set("a.commit", "position");
    return kept;
  }

  prompt(text) {
    byId("prompt").value = text;
    this.settingsChanged();
  }

  settingsChanged() {
    clearProblems(this);
    const blanks = Array.from(byId("prompt").value.matchAll(BLANK), (match) => Number(match[1]));
    const total = blanks.reduce((sum, size) => sum + size, 0);
    byId("blanks").textContent = blanks.length ? `Now: ${many(blanks.length, "blank")}, ${many(total, "token")}.` : "Now: none, so the text continues behind the prompt.";
    this.keep();
    this.code();
  }

  /** One run or two. */
  layout() {
    const two = this.comparing;
    this.decoders[0].title.textContent = two ? "Decoder A" : "Decoder";
    this.decoders[1].title.textContent = "Decoder B";
    for (const part of [this.decoders[1].element, this.decoders[1].pick.element, this.runs[1].element, this.runs[1].costs, byId("which")]) part.hidden = !two;
    this.runs[0].costs.firstChild.hidden = !two;
    this.runs[0].name.textContent = two ? "A" : "Canvas";
    this.runs[1].name.textContent = "B";
    this.introduce();
    for (const id of ["runs", "figures"]) byId(id).classList.toggle("two", two);
    if (!two) this.which.set("0");
    this.figures();
    this.player.draw();
    this.settingsChanged();
  }

  /** Colours, numbers and their legend. */
  look() {
    const colours = this.colours.value();
    for (const run of this.runs) {
      run.canvas.colours = colours;
      run.box.dataset.numbers = this.numbers.value();
    }
    this.player.draw();
    const key = (look, text) => make("span", { className: "key" }, make("span", { className: `token ${look}`, ariaHidden: "true" }, "\u00a0"), text);
    const keys = [key("given", "given"), key("masked", "masked")];
    if (colours === "lane") {
      const most = Math.max(1, ...this.shown().map((run) => run.recording?.start.lanes ?? 1));
      for (let lane = 1; lane <= Math.min(8, most); lane++) keys.push(swatch(lane));
      keys.push(make("span", { className: "quiet" }, most > 8 ? "lane; the colours repeat after eight" : "lane"), key("chunk-0 lane-head", "head: written last"));
    } else if (colours === "chunk") {
      const most = Math.max(0, ...this.shown().flatMap((run) => run.steps.map((step) => step.chunk)));
      for (let chunk = 1; chunk <= Math.min(8, most || this.info.num_chunks || 8); chunk++) {
        keys.push(swatch(chunk));
      }
      keys.push(make("span", { className: "quiet" }, most > 8 ? "chunk; the colours repeat after eight" : "chunk, in the order of filling"));
    } else if (colours === "confidence") {
      CONFIDENCE_NAMES.forEach((name, at) => keys.push(key(`sure-${at + 1}`, name)));
    } else {
      const ramp = Array.from({ length: ORDERS }, (_, at) => make("span", { className: `token order-${at + 1}` }, "\u00a0"));
      keys.push(make("span", { className: "key" }, "first", make("span", { className: "ramp", ariaHidden: "true" }, ...ramp), "last filled"));
    }
    byId("legend").replaceChildren(...keys);
    this.keep();
  }

  /** The requests that the form asks for; null, with the first wrong field focused, where it does not fit. */
  read() {
    clearProblems(this);
    const decoders = this.decoders.slice(0, this.comparing ? 2 : 1);
    if ([this.shared, ...decoders].map((part) => part.check()).every(Boolean)) return decoders.map((each) => this.request(each));
    this.decoders.forEach((each) => each.element.querySelector("[aria-invalid]") && (each.element.open = true));
    byId("form").querySelector("[aria-invalid]").focus();
    return null;
  }

  request(decoder) {
    return { prompt: byId("prompt").value, ...this.shared.read(), ...decoder.read() };
  }

  async generate() {
    const requests = this.read();
    if (!requests) return;
    this.requests = requests;
    this.abort = new AbortController();
    this.say("Generating …");
    this.busy(true);
    byId("verdict").hidden = true;
    this.shown().forEach((run, at) => run.clear(at ? "Waits for A, so that neither slows the other." : "Waiting for the server …"));
    this.player.open();
    this.followed = false;
    this.revealing = setTimeout(() => this.reveal(), 600); // what is refused at once is read beside the button
    let problem = null;
    let at = 0;
    try {
      for (; at < requests.length; at++) await this.runDecoder(at);
    } catch (reason) {
      problem = reason;
    }
    this.abort = null;
    clearTimeout(this.revealing);
    this.busy(false);
    this.finished(problem, at);
  }

  runDecoder(at) {
    const run = this.runs[at];
    let waiting = false;
    const update = () => {
      waiting = false;
      if (!this.abort) return; // the run has ended since
      this.player.grown();
      this.say(`${this.comparing ? `${run.letter}: ` : ""}${run.progress}`);
    };
    this.say(run.progress);
    return run.start(this.requests[at], this.decoders[at].info, this.abort.signal, (what) => {
      if (what === "start" && !this.followed) this.reveal();
      if (what === "start") this.look();
      if (what !== "commit") update();
      else if (!waiting) {
        waiting = true;
        requestAnimationFrame(update);
      }
    });
  }

  finished(problem, at) {
    this.figures();
    this.look();
    if (problem) {
      this.shown().forEach((run) => run.recording || run.clear());
      const stopped = problem.name === "AbortError";
      this.say(stopped ? "Stopped." : this.runs[at].recording ? "Not finished." : "Nothing was generated.");
      this.player.grown();
      if (!stopped) showProblem(problem, () => this.generate(), this, at);
      return;
    }
    this.say(this.shown().map((run) => `${this.comparing ? `${run.letter}: ` : ""}${run.progress}`).join(" "));
    if (this.comparing && !this.player.touched && !stillness.matches) {
      this.player.at = 0; // both together now
      this.player.play();
    } else this.player.grown();
    this.code();
  }

  figures() {
    const [a, b] = this.runs.map((run) => run.recording?.done ?? null);
    this.runs[0].showFigures(this.comparing ? b : null);
    this.runs[1].showFigures(a);
    byId("figures").hidden = !a && !b;
    const sentence = this.comparing ? verdict(...this.runs) : "";
    byId("verdict").textContent = sentence;
    byId("verdict").hidden = !sentence;
  }

  say(sentence) {
    const status = byId("status");
    if (status.textContent !== sentence) status.textContent = sentence;
  }

  busy(yes) {
    byId("generate").ariaDisabled = String(yes); // not disabled: whoever pressed it keeps the focus
    byId("stop").ariaDisabled = String(!yes);
    byId("runs").ariaBusy = String(yes);
    byId("status").ariaLive = yes ? "off" : "polite"; // every token would be too much to listen to
  }

  /** On narrow screens the canvas is below the form: go there once there is something to see. */
  reveal() {
    clearTimeout(this.revealing);
    if (byId("results").getBoundingClientRect().top <= innerHeight * 0.6) return;
    this.followed = true;
    byId("results").scrollIntoView({ behavior: stillness.matches ? "auto" : "smooth" });
  }

  code() {
    const at = Number(this.which.value());
    const text = this.runs[at].recording?.done?.text;
    const decoder = this.decoders[at];
    const { model, info } = decoder;
    byId("code").textContent = written(this.languages.value(), this.request(decoder), { model, folder: info.folder ?? model, settings: info.settings }, text);
    byId("copied").textContent = "";
  }

  async copy() {
    const text = byId("code").textContent;
    try {
      await navigator.clipboard.writeText(text);
      byId("copied").textContent = "Copied.";
    } catch {
      getSelection().selectAllChildren(byId("code"));
      byId("copied").textContent = "Selected; press Ctrl+C.";
    }
  }

  /** Settings live in the address, so that a view can be shared. */
  keep() {
    const kept = new URLSearchParams();
    kept.set("prompt", byId("prompt").value);
    this.shared.keep(kept);
    this.decoders[0].keep(kept);
    if (this.comparing) {
      kept.set("compare", "1");
      this.decoders[1].keep(kept);
    }
    if (this.colours.value() !== this.plainColours) kept.set("colour", this.colours.value());
    if (this.numbers.value() !== "forward") kept.set("number", this.numbers.value());
    this.kept = kept.toString();
    clearTimeout(this.keeping); // browsers refuse to rewrite the address too often
    this.keeping = setTimeout(() => history.replaceState(null, "", `#${this.kept}`), 200);
  }

  restore(kept = new URLSearchParams(location.hash.slice(1))) {
    this.decoders[0].use(kept.get("a.model") ?? this.names[0]);
    if (!kept.has("prompt") && this.examples.length) {
      for (const [name, value] of this.settingsOf(this.examples[0])) if (!kept.has(name)) kept.set(name, value);
    }
    byId("prompt").value = kept.get("prompt") ?? "";
    this.shared.restore(kept);
    this.decoders.forEach((each) => each.restore(kept));
    byId("compare").checked = kept.get("compare") === "1";
    this.colours.set(["chunk", "confidence", "order"].includes(kept.get("colour")) ? kept.get("colour") : this.plainColours);
    if (["chunk", "off"].includes(kept.get("number"))) this.numbers.set(kept.get("number"));
    this.layout();
    this.look();
  }
}

/** For the second decoder: a commit policy that does something else than the default. */
function contrast({ choices, means }) {
  const names = choices.map((each) => each.name);
  const other = ["chunk", "position", ...names].find((name) => names.includes(name) && !means.startsWith(name));
  const number = choices.find((each) => each.name === other)?.number ?? null;
  return number === null ? other ?? means : `${other}:${number}`;
}

begin();
