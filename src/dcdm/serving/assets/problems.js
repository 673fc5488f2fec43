/** What went wrong, said next to what caused it, and within sight. */

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

/** Say what went wrong next to what caused it, else where one looks; `again` tries once more. */
export function showProblem(problem, again, playground = null, at = 0) {
  if (!(problem instanceof Problem)) console.error(problem);
  const message = problem instanceof Problem ? problem.message : `Something in this page went wrong: ${problem.message}`;
  const name = problem.field?.split(/[.[]/)[0];
  const field = playground && (playground.shared.fields[name] ?? playground.decoders[at].fields[name]);
  if (field) {
    playground.decoders[at].element.open = true;
    show(field.complain(message));
    return;
  }
  if (playground && name === "prompt") {
    byId("prompt-error").textContent = message;
    byId("prompt-error").hidden = false;
    byId("prompt").setAttribute("aria-invalid", "true");
    show(byId("prompt"));
    return;
  }
  const box = byId("problem");
  if (playground?.followed || !inSight(byId("generate"))) byId("runs").before(box);
  else byId("generate").closest(".panel").append(box);
  box.replaceChildren(make("p", {}, message));
  box.hidden = false;
  if (!inSight(box) || playground?.followed) box.scrollIntoView({ block: "center" }); // at once: the page may be on its way
  if (!problem.again && !problem.reload) return;
  const button = make("button", { type: "button" }, problem.reload ? "Reload" : "Try again");
  button.addEventListener("click", () => (problem.reload ? location.reload() : again()));
  box.append(button);
  countDown(button, problem.wait);
}

/** Go to a control and into it; a page that is on its way elsewhere turns round. */
function show(control) {
  control.focus({ preventScroll: true });
  control.scrollIntoView({ block: "center" });
}

function inSight(element) {
  const { top, bottom } = element.getBoundingClientRect();
  return top >= 0 && bottom <= innerHeight;
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
