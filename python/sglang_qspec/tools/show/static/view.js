// Everything that shows an answer; the page and saved answers have the same view.
import { Answer, decodeRate } from "./answer.js";
import { lineChart } from "./charts.js";
import { details } from "./details.js";
import { counted, element, milliseconds, percent, rounded } from "./dom.js";
import { Timeline } from "./timeline.js";
import { Tokens } from "./tokens.js";
import { MEANINGS, SOURCES } from "./sources.js";

const POINTS = 300;

export class View {
  /** Shows `answer`, and below it `plain`, the same answer without speculation, unless that is null. */
  constructor(answer, plain) {
    this.answer = answer;
    this.plain = plain;
    this.waiting = false;
    this.tokens = new Tokens(answer, (token) => this.select(token));
    this.timeline = new Timeline(answer, (pass) => this.select(answer.passes[pass].start));
    this.legend = element("ul", { class: "legend", "aria-label": "tokens by source" });
    this.summary = element("p", { class: "summary" });
    this.error = element("p", { class: "error", role: "alert", hidden: "" });
    this.details = element("section", { class: "details", id: "details", "aria-live": "polite", "aria-label": "pass" });
    this.charts = element("div", { class: "charts" });
    this.plainText = element("div", { class: "tokens" });
    this.comparison = element("div", { class: "comparison" });
    this.other = plain && element("div", { class: "plain-answer" }, element("h2", {}, "Without speculation"), this.plainText, this.comparison);
    const letters = element("input", { type: "checkbox", id: "letters" });
    letters.addEventListener("change", () => this.tokens.root.classList.toggle("with-letters", letters.checked));
    this.root = element(
      "div",
      { class: plain ? "view compares" : "view" },
      element("div", { class: "answer" },
        element("div", { class: "bar-above" }, this.legend, element("label", { class: "switch" }, letters, " letters")),
        this.tokens.root, this.error, this.summary),
      this.other,
      this.details,
      element("section", { class: "over-time", "aria-label": "over time" }, element("h2", {}, "Passes"), this.timeline.root, this.charts),
    );
    this.hint();
  }

  hint() {
    this.details.replaceChildren(element("p", { class: "hint" }, "Point at a token, or walk through the answer with the arrow keys: this box then shows the pass that gave the token."));
  }

  /** Show the details of a token's pass, and mark it everywhere; `again` if they are already shown. */
  select(token, again = false) {
    if (token >= this.tokens.spans.length || (token === this.shown && !again)) return;
    this.shown = token;
    this.tokens.mark(token);
    const pass = this.answer.passOf[token];
    if (pass !== undefined) this.timeline.mark(pass);
    this.details.replaceChildren(details(this.answer, token));
  }

  /** Show what is new, once for all changes before the next frame. */
  update() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  /** Show what is new at once. */
  draw() {
    this.tokens.update();
    this.timeline.update();
    this.#drawLegend();
    this.#drawCharts();
    this.#drawSummary();
    this.#drawPlain();
    // The passes are known only now.
    if (this.answer.end && !this.isSettled && this.shown !== undefined) this.select(this.shown, true);
    this.isSettled = this.answer.end !== null;
    const errors = [this.answer.error, this.plain?.error && `Without speculation: ${this.plain.error}`].filter(Boolean);
    this.error.hidden = !errors.length;
    this.error.textContent = errors.join("\n");
  }

  #drawLegend() {
    const counts = this.answer.counts();
    const items = SOURCES.map((source) =>
      element("li", { title: MEANINGS[source], class: counts[source] ? null : "none" },
        element("span", { class: `token sample ${source}` }, source), ` ${counts[source]}`));
    this.legend.replaceChildren(...items);
  }

  #drawCharts() {
    const { rate, length } = this.answer.curves;
    const last = (points, format) => (points.length ? `: ${format(points[points.length - 1][1])}` : "");
    const figure = (title, points, options) =>
      element("figure", {}, element("figcaption", {}, title),
        lineChart({ label: title, xLabel: "output tokens", series: [{ name: title, kind: "plain", points: thinned(points) }], ...options }));
    this.charts.replaceChildren(
      figure(`Match rate${last(rate, percent)}`, rate, { format: percent, top: 1 }),
      figure(`Accept length${last(length, rounded)}`, length, { reference: 1 }),
    );
  }

  #drawSummary() {
    const { end, passes, tokens } = this.answer;
    if (!end) {
      this.summary.textContent = tokens.length ? `${counted(tokens.length, "token")} so far` : "";
      return;
    }
    // Announced once, not for each token.
    this.summary.setAttribute("role", "status");
    const parts = [`${counted(end.tokens, "token")} in ${counted(end.qspec?.passes ?? passes.length, "pass")}`];
    if (end.qspec) parts.push(`accept length ${rounded(end.qspec.accept_length)}`);
    parts.push(milliseconds(1000 * end.seconds), `first token after ${milliseconds(1000 * end.first_seconds)}`);
    if (decodeRate(end)) parts.push(`then ${rounded(decodeRate(end), 1)} tokens/s`);
    if (end.reason === "length") parts.push("ended at the maximum length");
    if (end.omitted_passes) parts.push(`${counted(end.omitted_passes, "pass")} left out of the trace`);
    this.summary.textContent = parts.join(" · ");
  }

  #drawPlain() {
    const { plain, answer } = this;
    if (!plain) return;
    this.plainText.textContent = plain.text || (plain.error ? "" : "waits for the other answer");
    this.plainText.classList.toggle("hint", !plain.text);
    if (!plain.end || !answer.end) return;
    const rates = [answer, plain].map(({ end }) => decodeRate(end));
    const row = (name, format) => element("tr", {}, element("th", { scope: "row" }, name), ...[answer.end, plain.end].map((end) => element("td", {}, format(end))));
    this.comparison.replaceChildren(
      element("p", { class: "ratio" }, rates[0] && rates[1] ? element("strong", {}, `${rounded(rates[0] / rates[1])} ×`) : null,
        ` the tokens per second of no speculation. The texts are ${plain.text === answer.text ? "identical" : "different"}.`),
      element("table", {},
        element("thead", {}, element("tr", {}, element("td"), element("th", { scope: "col" }, "QSPEC"), element("th", { scope: "col" }, "without"))),
        element("tbody", {},
          row("time", (end) => milliseconds(1000 * end.seconds)),
          row("until the first token", (end) => milliseconds(1000 * end.first_seconds)),
          row("tokens", (end) => String(end.tokens)),
          row("tokens/s after the first", (end) => (decodeRate(end) ? rounded(decodeRate(end), 1) : "-")))),
    );
  }
}

/** At most POINTS points, the last one included. */
function thinned(points) {
  const step = Math.ceil(points.length / POINTS);
  return points.filter((_, index) => (points.length - 1 - index) % step === 0);
}

/** An answer from the events that `events()` of it gave. */
export function rebuilt(events, answer = new Answer()) {
  for (const event of events) answer.add(event);
  return answer;
}
