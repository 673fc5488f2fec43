import { make, many, stillness } from "./dom.js";

/** Forwards per second; "live" goes as the model went. */
const SPEEDS = { 1: "1 forward pass/s", 3: "3 forward passes/s", 10: "10 forward passes/s", 30: "30 forward passes/s", live: "as it came" };

/**
 * Moves through the steps of recordings, live or later. `length()` is how many steps there are by now, `time(step)`
 * when a step came, if that is known, `live()` whether more may come, and `show(at, moving)` draws.
 */
export class Player {
  constructor(container, { length, show, time = null, live = () => false, speed = "10" }) {
    Object.assign(this, { length, time, live, show });
    this.at = 0;
    this.playing = false;
    this.touched = false; // whether the user has taken over since the run began
    this.timer = null;

    const button = (title, letter, act) => {
      const element = make("button", { type: "button", ariaLabel: title, title }, letter);
      element.addEventListener("click", act);
      return element;
    };
    this.button = button("Play", "▶", () => this.toggle());
    this.button.classList.add("play");
    this.slider = make("input", { type: "range", min: 0, max: 0, step: 1, value: 0, ariaLabel: "Forwards shown" });
    this.slider.addEventListener("input", () => this.go(Number(this.slider.value)));
    this.count = make("output");
    const speeds = Object.entries(SPEEDS).filter(([value]) => time || value !== "live");
    const options = speeds.map(([value, title]) => make("option", { value }, title));
    this.speed = make("select", { ariaLabel: "Speed of the replay" }, ...options);
    this.speed.value = time && stillness.matches ? "live" : speed;
    this.speed.addEventListener("change", () => this.playing && this.play());
    const back = button("One forward pass back", "‹", () => this.go(this.at - 1));
    const on = button("One forward pass on", "›", () => this.go(this.at + 1));
    const buttons = make("span", { className: "buttons" }, back, this.button, on);
    container.append(buttons, this.slider, this.count, this.speed);
    container.addEventListener("keydown", (event) => this.key(event, event.target !== this.speed));
    this.draw();
  }

  /** Keys of the replay and the canvas; `arrows` also take the arrow keys, where nothing else wants them. */
  key(event, arrows) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const onButton = event.target.tagName === "BUTTON" || event.target.tagName === "SELECT";
    const act = {
      ",": () => this.go(this.at - 1),
      ".": () => this.go(this.at + 1),
      " ": onButton ? null : () => this.toggle(),
      ArrowLeft: arrows ? () => this.go(this.at - 1) : null,
      ArrowRight: arrows ? () => this.go(this.at + 1) : null,
      Home: arrows ? () => this.go(0) : null,
      End: arrows ? () => this.go(this.length()) : null,
    }[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }

  /** Begin with a new run. */
  open() {
    this.halt();
    this.at = 0;
    this.touched = false;
    this.play();
  }

  /** More steps may be there. */
  grown() {
    if (this.playing && this.following()) this.at = this.length();
    this.draw(this.playing);
    if (this.playing && !this.timer && !this.following()) this.tick();
    if (this.playing && !this.live() && this.at >= this.length()) this.pause();
  }

  /** While the text still comes, showing it "as it came" is showing it as it comes. */
  following() {
    return this.speed.value === "live" && this.live();
  }

  go(step) {
    this.touched = true;
    this.pause();
    this.at = Math.max(0, Math.min(this.length(), step));
    this.draw();
  }

  toggle() {
    this.touched = true;
    if (this.playing) this.pause();
    else {
      if (this.at >= this.length() && !this.live()) this.at = 0;
      this.play();
    }
  }

  play() {
    this.halt();
    this.playing = true;
    this.draw();
    if (!this.following()) this.tick();
  }

  pause() {
    this.halt();
    this.playing = false;
    this.draw();
  }

  halt() {
    clearTimeout(this.timer);
    this.timer = null;
  }

  tick() {
    this.timer = null;
    if (this.at >= this.length()) {
      if (!this.live()) this.pause();
      return; // grown() resumes
    }
    const rate = Number(this.speed.value);
    const wait = rate ? 1000 / rate : 1000 * (this.time(this.at + 1) - (this.at ? this.time(this.at) : 0));
    this.timer = setTimeout(() => {
      this.at++;
      this.draw(true);
      this.tick();
    }, Math.max(0, wait));
  }

  draw(moving = false) {
    const length = this.length();
    this.slider.max = length;
    this.slider.value = this.at;
    this.slider.disabled = !length && !this.live();
    this.count.textContent = `${this.at} of ${many(length, "forward pass", "forward passes")}`;
    this.slider.setAttribute("aria-valuetext", this.count.textContent);
    const title = this.playing ? "Pause" : "Play";
    if (this.button.title !== title) {
      this.button.title = title;
      this.button.ariaLabel = title;
      this.button.textContent = this.playing ? "❚❚" : "▶";
    }
    this.show(this.at, moving || this.playing || this.at < length);
  }
}
