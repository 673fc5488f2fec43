/** A request in other forms: a command line, Python, the openai client, curl. */

const PLAIN = { seed: 0, max_tokens: null, stop_at_eos: true };

/** Whatever differs from what the tools do by themselves, the decoder's settings first. */
function changed(request, settings) {
  const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
  const decoder = settings.filter(({ name, default: usual, means }) => name in request && !same(request[name], usual) && !same(request[name], means));
  const names = [...decoder.map((each) => each.name), ...Object.keys(PLAIN).filter((name) => request[name] !== PLAIN[name])];
  return names.map((name) => [name, request[name]]);
}

/** A word that a POSIX shell reads as it stands. */
export const shell = (text) => (/^[\w@%+:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** A text as Python reads it: JSON's escapes are Python's too. */
const python = (text) => JSON.stringify(text);

function command(request, folder, settings) {
  const rare = new Set(["stop_at_eos", ...settings.filter((each) => each.rare).map((each) => each.name)]);
  const options = changed(request, settings);
  const flags = options.filter(([name]) => !rare.has(name));
  const set = options.filter(([name]) => rare.has(name)).map(([name, value]) => shell(`${name}=${JSON.stringify(value)}`));
  const prompt = request.prompt.startsWith("-") ? `--prompt=${shell(request.prompt)}` : `--prompt ${shell(request.prompt)}`;
  return [
    `dcdm sample ${shell(folder)}`, prompt,
    ...flags.map(([name, value]) => `--${name === "max_tokens" ? "length" : name.replaceAll("_", "-")} ${shell(String(value))}`),
    ...(set.length ? [`--set ${set.join(" ")}`] : []),
  ].join(" \\\n  ");
}

function library(request, folder, settings) {
  const options = changed(request, settings).map(([name, value]) => {
    if (name === "stop_at_eos") return "eos_id=-1";
    return `${name === "max_tokens" ? "max_new_tokens" : name}=${JSON.stringify(value)}`;
  });
  return `import dcdm

model, tokenizer = dcdm.load(${python(folder)})
result = dcdm.generate(
    model, [${python(request.prompt)}], tokenizer=tokenizer,
${options.length ? `    ${options.join(", ")},\n` : ""})
print(result.texts[0])
print(result.statistics.summary())
`;
}

function curl(request, settings) {
  const body = JSON.stringify({ ...(request.model ? { model: request.model } : {}), prompt: request.prompt, ...Object.fromEntries(changed(request, settings)) });
  return `curl -N ${location.origin}/v1/denoise \\\n  -H 'Content-Type: application/json' \\\n  -d ${shell(body)}`;
}

/** OpenAI's completions know a prompt and a suffix, so at most one blank; the model's own settings go beside. */
function client(request, model, settings) {
  const [before, length, after, ...more] = request.prompt.split(/\[\[(\d+)\]\]/);
  if (more.length || (length && request.max_tokens) || !request.stop_at_eos) {
    return "# OpenAI's completions know less: one blank, or a text to continue, which ends at the end-of-text token.\n# Use another form for this.\n";
  }
  const values = { model, prompt: before, ...(after ? { suffix: after } : {}) };
  const lines = Object.entries(values).map(([name, text]) => `    ${name}=${python(text)},\n`);
  const size = length ?? request.max_tokens;
  lines.push(size === null ? "    max_tokens=64,  # here the window is filled\n" : `    max_tokens=${size},\n`);
  lines.push(`    temperature=${request.temperature},\n    seed=${request.seed},\n`);
  if ("top_p" in request) lines.push(`    top_p=${request.top_p},\n`);
  const known = ["temperature", "top_p", ...Object.keys(PLAIN)];
  const extra = changed(request, settings).filter(([name]) => !known.includes(name));
  if (extra.length) lines.push(`    extra_body={${extra.map(([name, value]) => `"${name}": ${JSON.stringify(value)}`).join(", ")}},\n`);
  return `from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key="none")  # or the server's key
answer = client.completions.create(
${lines.join("")})
print(answer.choices[0].text)
`;
}

export const FORMS = { command: "Shell", python: "Python", openai: "OpenAI", curl: "curl", text: "Text" };

/** The request in one of the forms above; `text` is what came out of it, if anything has. */
export function written(form, request, { model, folder, settings }, text) {
  if (form === "command") return command(request, folder, settings);
  if (form === "python") return library(request, folder, settings);
  if (form === "openai") return client(request, model, settings);
  if (form === "curl") return curl(request, settings);
  return text ?? "Nothing generated yet.";
}
