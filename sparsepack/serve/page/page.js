// A chat with the model of this server, by its own API.

import { element, showMarkdown } from "./markdown.js";

const SETTINGS = "sparsepack.settings"; // in localStorage
const KEY = "sparsepack.key"; // in sessionStorage
const CHAT = "sparsepack.chat"; // in sessionStorage: a tab that is loaded again goes on
const FIELDS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];

const $ = (id) => document.getElementById(id);
const [log, message, settings] = [$("conversation"), $("message"), $("settings")];
const number = (value, digits = 0) => value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

let model = ""; // its name; empty: not known yet
let chat = []; // {role, content, thoughts, timings, ended, error, item}
let running = null; // the AbortController of the answer that is on its way

// Storage may be forbidden; the page works without.
const storage = (kind) => {
  try { return window[kind]; } catch { return null; }
};
function load(kind, name, otherwise) {
  try { return JSON.parse(storage(kind).getItem(name)) ?? otherwise; } catch { return otherwise; }
}
function save(kind, name, value) {
  try { storage(kind).setItem(name, JSON.stringify(value)); } catch { /* it is not kept */ }
}

/** A response of the server. Throws its error in words; with status 401 the field for the key appears. */
async function request(path, options = {}) {
  const key = load("sessionStorage", KEY, "");
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401) askForKey(key ? "The server does not take this key." : "Kept until this tab is closed.");
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answered ${response.status}`);
}

function askForKey(note) {
  $("key-note").textContent = note;
  $("key-form").hidden = false;
  $("key").focus();
}

async function showModel() {
  const { data: [found] } = await (await request("v1/models")).json();
  model = document.title = $("model").textContent = found.id;
  $("key-form").hidden = true;
  const { format, bits, score, suggested } = found.sparsepack;
  const lost = Object.entries(score ?? {}).filter(([, figures]) => figures?.perplexity_ratio?.value)
    .map(([name, { perplexity_ratio: { value } }]) => `${name} × ${number(value, 3)}`);
  const facts = [
    format,
    bits && `${number(bits.stored, 2)} bits a weight stored`,
    bits?.target < bits?.stored && `${number(bits.target, 2)} read (target)`,
    `context ${number(found.max_model_len)}`,
    lost.length && `packing: perplexity ${lost.join(", ")}`,
  ];
  $("facts").replaceChildren(...facts.filter(Boolean).map((fact) => element("span", {}, fact)));
  for (const [name, value] of Object.entries({ temperature: 1, top_p: 1, ...suggested })) {
    if (settings.elements[name]) settings.elements[name].placeholder = value;
  }
}

// The settings.

function showSettings() {
  const kept = load("localStorage", SETTINGS, {});
  for (const field of settings.elements) if (field.name) field.value = kept[field.name] ?? "";
  document.documentElement.dataset.theme = kept.theme ?? "";
}

settings.addEventListener("input", () => {
  save("localStorage", SETTINGS, Object.fromEntries(new FormData(settings)));
  document.documentElement.dataset.theme = settings.elements.theme.value;
});
settings.addEventListener("submit", (event) => event.preventDefault());
settings.addEventListener("reset", (event) => {
  event.preventDefault();
  save("localStorage", SETTINGS, {});
  showSettings();
});
$("settings-button").addEventListener("click", ({ currentTarget }) => {
  settings.hidden = !settings.hidden;
  currentTarget.setAttribute("aria-expanded", !settings.hidden);
  if (!settings.hidden) settings.elements.system.focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  save("sessionStorage", KEY, $("key").value);
  $("key").value = "";
  showModel().then(() => message.focus()).catch(showFailure);
});

// The conversation.

/** The body of a request for the answer to what is in the conversation. */
function body() {
  const fields = settings.elements;
  const given = FIELDS.filter((name) => fields[name].value !== "").map((name) => [name, Number(fields[name].value)]);
  const system = fields.system.value ? [{ role: "system", content: fields.system.value }] : [];
  const messages = chat.slice(0, -1).map(({ role, content }) => ({ role, content }));
  return { model, messages: [...system, ...messages], stream: true, timings_per_token: true, ...Object.fromEntries(given) };
}

/** The events of a response: what stands behind `data:`. */
async function* events(response) {
  let rest = "";
  for await (const piece of chunks(response.body.pipeThrough(new TextDecoderStream()).getReader())) {
    const whole = (rest + piece).split("\n\n");
    rest = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

async function* chunks(reader) { // not every browser iterates over streams
  for (let read; !(read = await reader.read()).done; ) yield read.value;
}

/** Answer what is in the conversation. */
async function answer() {
  const made = { role: "assistant", content: "", thoughts: "" };
  chat.push(made);
  running = new AbortController();
  announce("Answering.");
  show(made);
  showRunning();
  let raw = "";
  try {
    if (!model) await showModel();
    const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body()), signal: running.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const { choices, timings, error } = JSON.parse(data);
      if (error) throw new Error(error.message);
      made.timings = timings ?? made.timings;
      made.ended = choices?.[0]?.finish_reason ?? made.ended;
      const { content, reasoning_content } = choices?.[0]?.delta ?? {};
      raw += content ?? "";
      Object.assign(made, withoutThoughts(raw, made.thoughts + (reasoning_content ?? "")));
      showSoon(made);
    }
    if (!made.ended) throw new Error("the connection ended before the answer did");
  } catch (error) {
    if (running.signal.aborted) made.ended = "stopped";
    else made.error = error.message;
  }
  running = null;
  show(made);
  showRunning();
  keep();
  announce(made.error ?? (made.ended === "stopped" ? "Stopped." : made.item.querySelector(".text").textContent));
}

/** What a model thinks before its answer, `<think>`, apart from the answer. Templates may have begun it already. */
function withoutThoughts(text, thoughts) {
  const [, inside, after] = /^\s*(?:<think>)?(.*?)<\/think>(.*)$/s.exec(text) ?? [];
  if (inside !== undefined) return { thoughts: inside, content: after.trimStart() };
  const open = /^\s*<think>(.*)$/s.exec(text);
  if (open) return { thoughts: open[1], content: "" };
  return { thoughts, content: text };
}

function keep() {
  save("sessionStorage", CHAT, chat.map(({ item, ...rest }) => rest));
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = message.value.trim();
  if (!content || running) return;
  message.value = "";
  const sent = { role: "user", content };
  chat.push(sent);
  show(sent);
  answer();
});
message.addEventListener("keydown", (event) => {
  const send = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (!send || matchMedia("(pointer: coarse)").matches) return; // on a phone Enter begins a line
  event.preventDefault();
  $("composer").requestSubmit();
});
document.addEventListener("keydown", ({ key }) => key === "Escape" && running?.abort());
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  chat = [];
  log.replaceChildren();
  keep();
  message.focus();
});
log.addEventListener("click", async ({ target }) => {
  const found = chat.find(({ item }) => item.contains(target));
  if (target.dataset.copy === "code") await copy(target, target.closest("figure").querySelector("code").textContent);
  if (target.dataset.copy === "answer") await copy(target, found.content);
  if (target.dataset.again !== undefined && !running) {
    chat.pop().item.remove();
    answer();
  }
});

async function copy(button, text) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch { // without TLS, other machines have no clipboard
    const area = element("textarea", { class: "hidden" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
    button.focus();
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = before), 1500);
}

// What is seen.

function announce(what) {
  $("announcement").textContent = what;
}

/** Say why the model is not known; where the key is missing, its field says so. */
function showFailure({ message }) {
  if ($("key-form").hidden) $("facts").textContent = message;
  announce(message);
}

function showRunning() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  for (const button of log.querySelectorAll("[data-again]")) {
    button.hidden = running !== null || button.closest("article") !== log.lastChild;
  }
}

let drawn = 0;
/** Show a message in the next frame, once however many pieces come until then. */
function showSoon(one) {
  drawn ||= requestAnimationFrame(() => {
    drawn = 0;
    show(one);
  });
}

function show(one) {
  if (!chat.includes(one)) return; // cleared meanwhile
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  if (!one.item) {
    one.item = BUILD[one.role](one);
    log.append(one.item);
  }
  if (one.role === "assistant") showAnswer(one);
  if (follows || one.role === "user") log.scrollTop = log.scrollHeight;
}

const BUILD = {
  user: ({ content }) => element("article", { class: "user", "aria-label": "You" }, element("div", { class: "text" }, content)),
  assistant: () => element(
    "article", { class: "assistant", "aria-label": "Answer" },
    element("details", { class: "thoughts" }, element("summary"), element("div")),
    element("div", { class: "text" }),
    element("p", { class: "error" }),
    element(
      "div", { class: "tools" },
      element("p", { class: "status" }),
      element("button", { type: "button", "data-copy": "answer" }, "Copy"),
      element("button", { type: "button", "data-again": "" }, "Regenerate"),
    ),
  ),
};

function showAnswer(made) {
  const { item } = made, part = (name) => item.querySelector(name);
  const going = running !== null && made === chat.at(-1);
  item.classList.toggle("pending", going);
  part(".thoughts").hidden = !made.thoughts.trim();
  part("summary").textContent = going && !made.content ? "Thinking…" : "Thoughts";
  showMarkdown(part(".thoughts > div"), made.thoughts);
  showMarkdown(part(".text"), made.content);
  part(".error").hidden = !made.error;
  part(".error").textContent = made.error ?? "";
  part(".status").replaceChildren(...figures(made, going));
  part("[data-copy=answer]").hidden = going || !made.content;
}

const ENDED = { length: "limit of tokens reached", stopped: "stopped" };

/** How an answer was made: speed, and what its steps read of the weights. */
function figures({ timings, ended }, going) {
  const texts = [];
  if (timings) {
    texts.push(`${number(timings.predicted_n)} tokens`);
    if (timings.predicted_per_second) texts.push(`${number(timings.predicted_per_second, 1)} tokens/s`);
    if (!going) texts.push(`prompt ${number(timings.prompt_n)} tokens in ${number(timings.prompt_ms / 1000, 2)} s`);
  }
  if (ENDED[ended]) texts.push(ENDED[ended]);
  const shown = texts.map((text) => element("span", {}, text));
  if (timings?.skipped) {
    const read = 1 - timings.skipped;
    const title = "Of the weights of the model's blocks, in the mean of the answer's steps. A step reads for all answers that run together.";
    const share = ` ${number(100 * read)} % of bits read, ${number(timings.bits_read, 2)} a weight`;
    shown.push(element("span", { title }, element("meter", { value: read, "aria-hidden": "true" }), share));
  }
  return shown;
}

showSettings();
chat = load("sessionStorage", CHAT, []);
chat.forEach(show);
showRunning();
showModel().catch(showFailure);
