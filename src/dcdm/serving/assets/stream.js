/** The server: what it serves, and its stream of commits. */

/** What went wrong, in words for a person; `field` is the request's field at fault, `wait` seconds to hold off. */
export class Problem extends Error {
  constructor(text, { field = null, wait = 0, again = false, reload = false } = {}) {
    const message = text.replace(/^[a-z]+ /, (word) => word[0].toUpperCase() + word.slice(1));
    super(/[.!?]$/.test(message) ? message : `${message}.`);
    Object.assign(this, { field, wait, again, reload });
  }
}

const GONE = "The server does not answer. Is dcdm serve still running?";

async function ask(address, options = {}) {
  let answer;
  try {
    answer = await fetch(new URL(address, location.origin), options); // the page's own address may hold a password
  } catch (reason) {
    if (reason.name === "AbortError") throw reason;
    throw new Problem(GONE, { again: true });
  }
  if (!answer.ok) throw await problemOf(answer);
  return answer;
}

/** The server's error as a Problem. */
async function problemOf(answer) {
  const body = await answer.json().catch(() => null);
  const error = body?.error ?? {};
  const message = error.message ?? `The server answered ${answer.status} without saying why.`;
  if (answer.status === 401) {
    return new Problem("This server requires its key. Reload the page and give the key as the password; any name will do.", { reload: true });
  }
  if (answer.status === 429 || answer.status === 503) {
    const wait = Math.max(1, Math.ceil(Number(answer.headers.get("Retry-After")) || 1));
    return new Problem(message, { wait, again: true });
  }
  return new Problem(message, { field: error.param ?? null, again: answer.status >= 500 });
}

/** The models that this server has, with what fits them. */
export async function models() {
  return (await (await ask("/v1/models")).json()).data;
}

/** Run one request; `on(name, data)` hears every event in order. Ends after "done", throws a Problem otherwise. */
export async function denoise(request, signal, on) {
  const answer = await ask("/v1/denoise", {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify(request),
    signal,
  });
  let done = false;
  for await (const { name, data } of events(answer.body.getReader())) {
    if (name === "error") {
      const { message = "The server gave up without saying why.", param = null } = data.error ?? {};
      throw new Problem(message, { field: param, again: !param });
    }
    on(name, data);
    done ||= name === "done";
  }
  if (!done) throw new Problem("The server stopped in the middle of the text. What had come until then is shown.", { again: true });
}

/** Server-sent events of a body: blocks of lines that end with an empty one. */
async function* events(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (reason) {
      if (reason.name === "AbortError") throw reason;
      throw new Problem(GONE, { again: true });
    }
    if (part.done) return;
    rest += decoder.decode(part.value, { stream: true }).replaceAll("\r\n", "\n");
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event) yield event;
    }
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { name, data: JSON.parse(data.join("\n")) } : null; // comments keep the line open
}
