// The page: its form, the questions it asks, and the answers it shows.
import { Answer, PlainAnswer } from "./answer.js";
import { element } from "./dom.js";
import { download, savedPage } from "./saving.js";
import { ask } from "./stream.js";
import { View } from "./view.js";

const [form, stop, save, place, about] = ["form", "stop", "save", "place", "about"].map((id) => document.getElementById(id));
const { prompt, pick, tokens, temperature, completions, chat, compare, send } = form.elements;
let running = null; // AbortController of the question in flight
let shown = null; // {question, view}
let server = { url: "", model: "", prompts: [] };

function question() {
  const warmth = Number(temperature.value);
  return {
    prompt: prompt.value,
    chat: chat.checked,
    max_new_tokens: Number(tokens.value),
    temperature: warmth,
    // One seed for both answers, so that they are comparable.
    seed: warmth > 0 ? crypto.getRandomValues(new Uint32Array(1))[0] >>> 1 : null,
    completions: completions.value ? Number(completions.value) : null,
    speculate: true,
  };
}

async function run() {
  if (running) return;
  const asked = question();
  const answer = new Answer();
  const plain = compare.checked ? new PlainAnswer() : null;
  const view = new View(answer, plain);
  shown = { question: asked, view };
  place.replaceChildren(view.root);
  if (place.getBoundingClientRect().top > innerHeight / 2) view.root.scrollIntoView();
  running = new AbortController();
  busy(true);
  try {
    await fill(answer, asked, view);
    if (plain && !answer.error) await fill(plain, { ...asked, speculate: false }, view);
  } finally {
    running = null;
    busy(false);
  }
}

/** Add the events of one question to an answer; an error stays with the part that came. */
async function fill(answer, asked, view) {
  try {
    for await (const event of ask(asked, running.signal)) {
      answer.add(event);
      view.update();
    }
  } catch (error) {
    answer.error = error.name === "AbortError" ? "You stopped the answer." : error.message;
  }
  view.draw();
}

function busy(is) {
  send.disabled = is;
  stop.disabled = !is;
  save.disabled = is;
  place.setAttribute("aria-busy", is);
}

async function saveAnswer() {
  const { question: asked, view } = shown;
  const text = await savedPage({
    question: asked,
    server: { url: server.url, model: server.model },
    answer: view.answer.events(),
    plain: view.plain?.events() ?? null,
    date: new Date().toISOString().slice(0, 16).replace("T", " ") + " UTC",
  });
  if (text) download(text, "qspec-answer.html");
  else about.textContent = "The answer cannot be saved: the template of the file did not load. Reload the page while qspec show runs.";
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
pick.addEventListener("change", () => {
  if (pick.value) prompt.value = server.prompts[Number(pick.value)];
});
stop.addEventListener("click", () => running?.abort());
save.addEventListener("click", saveAnswer);

try {
  server = await (await fetch("server")).json();
  about.textContent = `${server.model} at ${server.url}`;
  for (const [index, text] of server.prompts.entries()) {
    pick.append(element("option", { value: index }, `${index + 1}: ${text.length > 80 ? `${text.slice(0, 79)}…` : text}`));
  }
  document.getElementById("picker").hidden = !server.prompts.length;
} catch {
  about.textContent = "The command qspec show does not answer; it may have ended.";
}
