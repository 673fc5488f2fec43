/** What went wrong, said next to what caused it. */

import { byId, make } from "./dom.js";
import { Problem } from "./stream.js";

/** Take back whatever was complained about. */
export function clearProblems(playground) {
  byId("problem").hidden = true;
  byId("prompt").removeAttribute("aria-invalid");
  byId("prompt-error").hidden = true;
  for (const part of playground ? [playground.shared, ...playground.decoders] : []) {
    Object.values(part.fields).forEach((field) => field.complain(""));
  }
}

/** Say what went wrong next to what caused it, else beside the button; `again` tries once more. */
export function showProblem(problem, again, playground = null, at = 0) {
  if (!(problem instanceof Problem)) console.error(problem);
  const message = problem instanceof Problem ? problem.message : `Something in this page went wrong: ${problem.message}`;
  const name = problem.field?.split(/[.[]/)[0];
  const field = playground && (playground.shared.fields[name] ?? playground.decoders[at].fields[name]);
  if (field) {
    playground.decoders[at].element.open = true;
    field.complain(message).focus();
    return;
  }
  if (playground && name === "prompt") {
    byId("prompt-error").textContent = message;
    byId("prompt-error").hidden = false;
    byId("prompt").setAttribute("aria-invalid", "true");
    byId("prompt").focus();
    return;
  }
  const box = byId("problem");
  box.replaceChildren(make("p", {}, message));
  box.hidden = false;
  if (!problem.again && !problem.reload) return;
  const button = make("button", { type: "button" }, problem.reload ? "Reload" : "Try again");
  button.addEventListener("click", () => (problem.reload ? location.reload() : again()));
  box.append(button);
  countDown(button, problem.wait);
}

/** The server asked for a pause: the button waits with it. */
function countDown(button, seconds) {
  if (!seconds) return;
  const title = button.textContent;
  button.disabled = true;
  const tick = (left) => {
    button.textContent = left ? `${title} in ${left} s` : title;
    button.disabled = left > 0;
    if (left) setTimeout(() => tick(left - 1), 1000);
  };
  tick(seconds);
}
