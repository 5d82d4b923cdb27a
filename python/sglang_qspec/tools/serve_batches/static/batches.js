// The page: the batches of one tenant, whose key stays in this tab of the browser.
import { counted, element, rounded } from "./dom.js";

const PAUSE_MS = 2000;
const MOST = 100;
const KEY = "key";
const FINAL = ["completed", "failed", "expired", "cancelled"];
/** The cells of a batch by their heads: texts or elements. */
const COLUMNS = {
  batch: (batch) => batch.id,
  created: (batch) => time(batch.created_at),
  state,
  lines,
  deadline,
  "done in": (batch) => (isOver(batch) || batch.qspec.estimated_seconds === null ? "" : duration(batch.qspec.estimated_seconds)),
  "tokens/s": (batch) => (batch.qspec.tokens_per_second === null ? "" : rounded(batch.qspec.tokens_per_second, 1)),
  "accept length": ({ qspec }) => (qspec.passes ? rounded((qspec.passes + qspec.passes_saved) / qspec.passes) : ""),
};

const [form, about, failure, place, forget] = ["form", "about", "error", "batches", "forget"].map((id) => document.getElementById(id));
const body = place.querySelector("tbody");
const rows = new Map(); // {row, cells, cancel} by id of the batch
let timer = null;

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The JSON that the service answers. */
async function ask(path, method = "GET") {
  const headers = { Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` };
  const response = await fetch(path, { method, headers, credentials: "omit" });
  const answer = await response.json();
  if (!response.ok) throw new Refusal(response.status, answer.error.message);
  return answer;
}

function isOver(batch) {
  return FINAL.includes(batch.status);
}

function time(seconds) {
  return new Date(1000 * seconds).toLocaleString([], { dateStyle: "short", timeStyle: "short" });
}

function duration(seconds) {
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0 s";
  let left = Math.round(seconds);
  return units.slice(first, first + 2).map(([name, size]) => {
    const count = Math.floor(left / size);
    left -= count * size;
    return `${count} ${name}`;
  }).join(" ");
}

function state(batch) {
  const error = batch.errors?.data[0]?.message;
  return [batch.status, error ?? (isOver(batch) ? null : batch.qspec.waits_for)].filter(Boolean).join(": ");
}

function lines({ request_counts: { total, completed, failed } }) {
  const text = `${completed + failed} of ${total}${failed ? `, ${failed} failed` : ""}`;
  const bar = element("progress", { max: Math.max(total, 1), value: completed + failed, "aria-label": text });
  return element("span", {}, bar, ` ${text}`);
}

function deadline(batch) {
  const left = batch.expires_at - Date.now() / 1000;
  const text = isOver(batch) ? time(batch.expires_at) : left > 0 ? `in ${duration(left)}` : "over";
  return element("span", { title: time(batch.expires_at) }, text);
}

/** The row of a batch. It stays when its figures change, and so does the focus. */
function rowOf(id) {
  if (!rows.has(id)) {
    const cells = Object.keys(COLUMNS).map((_, index) => element(index ? "td" : "th", { scope: index ? null : "row" }));
    const cancel = element("button", { type: "button", "aria-label": `Cancel ${id}` }, "Cancel");
    cancel.addEventListener("click", () => end(id));
    rows.set(id, { row: element("tr", { id }, ...cells, element("td", {}, cancel)), cells, cancel });
  }
  return rows.get(id);
}

function show({ data, has_more: more }) {
  about.textContent = counted(data.length, "batch") + (more ? ", the newest ones" : "");
  const order = data.map((batch) => {
    const { row, cells, cancel } = rowOf(batch.id);
    Object.values(COLUMNS).forEach((cell, index) => cells[index].replaceChildren(cell(batch)));
    cancel.hidden = isOver(batch);
    cancel.disabled = !["validating", "in_progress"].includes(batch.status);
    return row;
  });
  order.forEach((row, index) => {
    if (body.children[index] !== row) body.insertBefore(row, body.children[index] ?? null);
  });
  while (body.children.length > order.length) body.lastChild.remove();
}

async function end(id) {
  if (!confirm(`Cancel ${id}? Its answers so far are kept.`)) return;
  try {
    await ask(`v1/batches/${id}/cancel`, "POST");
    await refresh();
  } catch (error) {
    complain(error.message);
  }
}

function complain(message) {
  failure.textContent = message;
  failure.hidden = !message;
}

/** Show the batches now, and again after a pause. */
async function refresh() {
  clearTimeout(timer);
  const key = sessionStorage.getItem(KEY);
  try {
    const found = await ask(`v1/batches?limit=${MOST}`);
    if (key !== sessionStorage.getItem(KEY)) return; // another key was entered meanwhile
    show(found);
    complain("");
    enter(false);
  } catch (error) {
    if (error.status === 401) return enter(true, key === null ? "" : error.message);
    complain(error.status ? error.message : "The service does not answer.");
  }
  timer = setTimeout(refresh, PAUSE_MS);
}

/** Ask for a key, or show the batches. */
function enter(asks, message = "") {
  form.hidden = !asks;
  place.hidden = asks;
  forget.hidden = asks || sessionStorage.getItem(KEY) === null;
  if (!asks) return;
  complain(message);
  about.textContent = "";
  rows.clear();
  body.replaceChildren();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, form.elements.key.value.trim());
  form.reset();
  refresh();
});
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  refresh();
});

place.querySelector("thead tr").append(...Object.keys(COLUMNS).map((head) => element("th", { scope: "col" }, head)), element("td"));
refresh();
