// A report of a benchmark: a paragraph, charts, and tables.
import { boxChart, dotChart, legendMark, lineChart } from "./charts.js";
import { element } from "./dom.js";

const DRAW = { boxes: boxChart, lines: lineChart, dots: dotChart };

const report = JSON.parse(document.getElementById("data").textContent);

function chart({ title, caption, kind, options }) {
  const drawing = options ? DRAW[kind]({ label: title, ...options }) : element("p", {}, "None of the configurations that this chart shows was served.");
  const names = options?.names ?? [];
  const legend = names.length > 1 && element("ul", { class: "legend" }, ...names.map((name, index) => element("li", {}, legendMark(index), ` ${name}`)));
  return element("figure", {}, element("figcaption", {}, title), legend || null, drawing, element("p", {}, caption));
}

function table({ title, head, lines, note }) {
  const row = (cells, kind) => element("tr", {}, ...cells.map((cell, index) => element(index ? kind : "th", { scope: index ? null : "row" }, cell)));
  return element("section", {},
    element("h2", {}, title),
    element("div", { class: "scrolled", tabindex: "0", role: "group", "aria-label": title },
      element("table", {}, element("thead", {}, row(head, "th")), element("tbody", {}, ...lines.map((line) => row(line, "td"))))),
    note ? element("p", { class: "note" }, note) : null);
}

document.body.append(
  element("main", { class: "report" },
    element("h1", {}, report.title),
    element("p", {}, report.headline),
    element("div", { class: "charts" }, ...report.charts.map(chart)),
    ...report.tables.map(table),
    ...report.failures.map((failure) => element("p", { class: "error" }, failure)),
    element("h2", {}, "Method"),
    element("p", { class: "note" }, report.method),
    element("dl", { class: "note" }, ...report.facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]))),
);
