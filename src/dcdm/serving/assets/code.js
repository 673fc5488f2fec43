/** A request in other forms: a command line, Python, the openai client, curl. */

const PLAIN = { routing: "auto", commit: "auto", lanes: null, drafts: null, temperature: 1, top_k: null, top_p: null, cache: "auto", seed: 0, max_tokens: null, stop_at_eos: true };

/** Whatever differs from what the tools do by themselves. */
const changed = (request) => Object.entries(request).filter(([name, value]) => name in PLAIN && value !== PLAIN[name]);

/** A word that a POSIX shell reads as it stands. */
export const shell = (text) => (/^[\w@%+:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** A text as Python reads it: JSON's escapes are Python's too. */
const python = (text) => JSON.stringify(text);

function command(request, folder) {
  const options = changed(request).map(([name, value]) => {
    if (name === "stop_at_eos") return "--no-stop-at-eos";
    return `--${name === "max_tokens" ? "length" : name.replaceAll("_", "-")} ${shell(String(value))}`;
  });
  if (request.delimiters) options.push(`--delimiters ${request.delimiters.map(shell).join(" ")}`, `--delimiter-threshold ${request.delimiter_threshold}`);
  const prompt = request.prompt.startsWith("-") ? `--prompt=${shell(request.prompt)}` : `--prompt ${shell(request.prompt)}`;
  return [`dcdm sample ${shell(folder)}`, prompt, ...options].join(" \\\n  ");
}

function library(request, folder) {
  const options = changed(request).map(([name, value]) => {
    if (name === "stop_at_eos") return "eos_id=-1";
    return `${name === "max_tokens" ? "max_new_tokens" : name}=${typeof value === "string" ? python(value) : value}`;
  });
  const adablock = request.delimiters && `adablock = AdaBlock(
    tuple(tokenizer.encode(text)[0] for text in [${request.delimiters.map(python).join(", ")}]), model.config.block_size or 8,
    least=${request.delimiter_threshold},
)\n`;
  if (adablock) options.push("adablock=adablock");
  return `import dcdm
${adablock ? "from dcdm.decoding.routes import AdaBlock\n" : ""}
model, tokenizer = dcdm.load(${python(folder)})
${adablock || ""}result = dcdm.generate(
    model, [${python(request.prompt)}], tokenizer=tokenizer,
${options.length ? `    ${options.join(", ")},\n` : ""})
print(result.texts[0])
print(result.statistics.summary())
`;
}

function curl(request) {
  const body = JSON.stringify({ prompt: request.prompt, ...Object.fromEntries(changed(request)), ...ends(request) });
  return `curl -N ${location.origin}/v1/denoise \\\n  -H 'Content-Type: application/json' \\\n  -d ${shell(body)}`;
}

const ends = ({ delimiters, delimiter_threshold }) => (delimiters ? { delimiters, delimiter_threshold } : {});

/** OpenAI's completions know a prompt and a suffix, so at most one blank; the model's own settings go beside. */
function client(request, model) {
  const [before, length, after, ...more] = request.prompt.split(/\[\[(\d+)\]\]/);
  if (more.length || (length && request.max_tokens) || request.delimiters || !request.stop_at_eos) {
    return "# OpenAI's completions know less: one blank, or a text to continue, which ends at the end-of-text token.\n# Use another form for this.\n";
  }
  const values = { model, prompt: before, ...(after ? { suffix: after } : {}) };
  const lines = Object.entries(values).map(([name, text]) => `    ${name}=${python(text)},\n`);
  const size = length ?? request.max_tokens;
  lines.push(size === null ? "    max_tokens=64,  # here the window is filled\n" : `    max_tokens=${size},\n`);
  lines.push(`    temperature=${request.temperature},\n    seed=${request.seed},\n`);
  if (request.top_p !== null) lines.push(`    top_p=${request.top_p},\n`);
  const extra = changed(request).filter(([name]) => ["routing", "commit", "lanes", "drafts", "top_k", "cache"].includes(name));
  const literal = (value) => (typeof value === "string" ? python(value) : value);
  if (extra.length) lines.push(`    extra_body={${extra.map(([name, value]) => `"${name}": ${literal(value)}`).join(", ")}},\n`);
  return `from openai import OpenAI

client = OpenAI(base_url="${location.origin}/v1", api_key="none")  # or the server's key
answer = client.completions.create(
${lines.join("")})
print(answer.choices[0].text)
`;
}

export const FORMS = { command: "Shell", python: "Python", openai: "OpenAI", curl: "curl", text: "Text" };

/** The request in one of the forms above; `text` is what came out of it, if anything has. */
export function written(form, request, { model, folder }, text) {
  if (form === "command") return command(request, folder);
  if (form === "python") return library(request, folder);
  if (form === "openai") return client(request, model);
  if (form === "curl") return curl(request);
  return text ?? "Nothing generated yet.";
}
