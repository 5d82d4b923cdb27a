// Charts as SVG for the page, for saved answers and for reports of benchmarks. Each is drawn 360 units wide, so its
// text is readable on a phone, and grows with its place.
import { drawn, rounded } from "./dom.js";

const WIDTH = 360;
const [LEFT, RIGHT, TOP, BOTTOM] = [42, 10, 10, 32];
const MARKS = ["circle", "square", "triangle", "diamond"];

/**
 * Lines over a linear axis, or over equal steps of the given `ticks`.
 * `series`: [{name, kind, points: [[x, y], ...]}]; `kind` is a class. `format` writes a value of y.
 */
export function lineChart({ label, series, xLabel, format = rounded, top = null, ticks = null, reference = null }) {
  const height = 180;
  const points = series.flatMap((one) => one.points);
  const most = Math.max(0, ...points.map(([, y]) => y), reference ?? 0);
  const y = scale(0, top ?? (1.08 * most || 1), height - BOTTOM, TOP);
  const last = Math.max(1, ...points.map(([x]) => x));
  const place = ticks
    ? (x) => LEFT + ((ticks.indexOf(x) + 0.5) * (WIDTH - LEFT - RIGHT)) / ticks.length
    : scale(0, last, LEFT, WIDTH - RIGHT);
  const chart = frame(label, height);
  grid(chart, y, format, height);
  for (const x of ticks ?? steps(last)) {
    chart.append(drawn("text", { x: place(x), y: height - 16, class: "tick", "text-anchor": "middle" }, rounded(x)));
  }
  axisName(chart, xLabel, height);
  line(chart, y, reference);
  for (const [index, one] of series.entries()) {
    const kind = one.kind ?? `series-${index}`;
    const path = one.points.map(([x, value], at) => `${at ? "L" : "M"}${fixed(place(x))} ${fixed(y(value))}`).join("");
    chart.append(drawn("path", { d: path, class: `curve ${kind}` }));
    if (ticks) for (const [x, value] of one.points) chart.append(mark(index, place(x), y(value), kind, `${one.name} ${rounded(x)}: ${format(value)}`));
  }
  return chart;
}

/**
 * Boxes over the quartiles with a line at the mean, one below the other. Whiskers end at the last value within 1.5
 * times the distance of the quartiles, and the axis with the longest whisker. `rows`: [{name, values}].
 */
export function boxChart({ label, rows, xLabel, reference = null, top = null }) {
  const step = 38;
  const height = TOP + rows.length * step + BOTTOM;
  const boxes = rows.map((row) => ({ ...row, ...box(row.values) }));
  const most = Math.max(...boxes.map((one) => Math.max(one.high, one.mean)), reference ?? 0);
  const x = scale(0, top ?? (1.05 * most || 1), LEFT + 48, WIDTH - RIGHT);
  const chart = frame(label, height);
  upright(chart, x, height);
  axisName(chart, xLabel, height);
  if (reference !== null) {
    chart.append(drawn("line", { x1: x(reference), x2: x(reference), y1: TOP, y2: height - BOTTOM, class: "reference" }));
  }
  boxes.forEach((one, index) => {
    const middle = TOP + (index + 0.5) * step;
    const group = drawn("g", { class: "box" }, drawn("title", {}, boxText(one)));
    group.append(
      drawn("text", { x: 2, y: middle - 1, class: "row" }, one.name),
      drawn("text", { x: 2, y: middle + 12, class: "tick" }, `n = ${one.values.length}`),
      drawn("line", { x1: x(one.low), x2: x(one.high), y1: middle, y2: middle, class: "whisker" }),
      drawn("rect", { x: x(one.first), y: middle - 9, width: Math.max(1, x(one.third) - x(one.first)), height: 18, rx: 2 }),
      drawn("line", { x1: x(one.mean), x2: x(one.mean), y1: middle - 12, y2: middle + 12, class: "mean" }),
    );
    chart.append(group);
  });
  return chart;
}

/**
 * Marks of several series in rows, one below the other. `names` are those of the series, and `rows`:
 * [{name, values: [number or null for each series]}].
 */
export function dotChart({ label, names, rows, xLabel, reference = null }) {
  const step = 30;
  const height = TOP + rows.length * step + BOTTOM;
  const known = rows.flatMap((row) => row.values.filter((value) => value !== null));
  const start = 14 + 6 * Math.max(...rows.map((row) => row.name.length));
  const x = scale(0, 1.08 * Math.max(...known, reference ?? 0), start, WIDTH - RIGHT);
  const chart = frame(label, height);
  upright(chart, x, height, start);
  axisName(chart, xLabel, height);
  if (reference !== null) {
    chart.append(drawn("line", { x1: x(reference), x2: x(reference), y1: TOP, y2: height - BOTTOM, class: "reference" }));
  }
  rows.forEach((row, index) => {
    const middle = TOP + (index + 0.5) * step;
    const places = row.values.map((value) => (value === null ? null : x(value)));
    const there = places.filter((place) => place !== null);
    chart.append(
      drawn("text", { x: 2, y: middle + 4, class: "row" }, row.name.replaceAll("_", " ")),
      drawn("line", { x1: Math.min(...there), x2: Math.max(...there), y1: middle, y2: middle, class: "whisker" }),
    );
    places.forEach((place, at) => {
      if (place !== null) chart.append(mark(at, place, middle, `series-${at}`, `${row.name}, ${names[at]}: ${rounded(row.values[at])}`));
    });
  });
  return chart;
}

/** The marks of `dotChart` and `lineChart` with the names of their series, as an SVG for each. */
export function legendMark(index) {
  return drawn("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true", class: "mark" }, mark(index, 7, 7, `series-${index}`, ""));
}

/** Quartiles, mean and ends of the whiskers of some values. */
export function box(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const [first, median, third] = [0.25, 0.5, 0.75].map((part) => quantile(sorted, part));
  const reach = 1.5 * (third - first);
  const inside = sorted.filter((value) => value >= first - reach && value <= third + reach);
  const mean = sorted.reduce((sum, value) => sum + value, 0) / sorted.length;
  return { first, median, third, mean, low: inside[0], high: inside[inside.length - 1] };
}

function quantile(sorted, part) {
  const at = part * (sorted.length - 1);
  const below = Math.floor(at);
  const above = Math.min(below + 1, sorted.length - 1);
  return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
}

function boxText(one) {
  return `${one.name}: mean ${rounded(one.mean)}, median ${rounded(one.median)}, quartiles ${rounded(one.first)} to ${rounded(one.third)}`;
}

function mark(index, x, y, kind, title) {
  const shape = MARKS[index % MARKS.length];
  const attributes = { class: `dot ${kind}` };
  const text = drawn("title", {}, title);
  if (shape === "circle") return drawn("circle", { cx: x, cy: y, r: 4.5, ...attributes }, text);
  if (shape === "square") return drawn("rect", { x: x - 4, y: y - 4, width: 8, height: 8, ...attributes }, text);
  const corners = shape === "triangle" ? [[0, -5], [5, 4], [-5, 4]] : [[0, -5.5], [5.5, 0], [0, 5.5], [-5.5, 0]];
  return drawn("polygon", { points: corners.map(([a, b]) => `${fixed(x + a)},${fixed(y + b)}`).join(" "), ...attributes }, text);
}

function frame(label, height) {
  return drawn("svg", { viewBox: `0 0 ${WIDTH} ${height}`, class: "chart", role: "img", "aria-label": label });
}

function grid(chart, y, format, height) {
  for (const value of steps(y.most)) {
    chart.append(
      drawn("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value), class: "grid" }),
      drawn("text", { x: LEFT - 6, y: y(value) + 4, class: "tick", "text-anchor": "end" }, format(value)),
    );
  }
  chart.append(drawn("line", { x1: LEFT, x2: LEFT, y1: TOP, y2: height - BOTTOM, class: "axis" }));
}

function upright(chart, x, height, start = LEFT + 48) {
  for (const value of steps(x.most)) {
    chart.append(
      drawn("line", { x1: x(value), x2: x(value), y1: TOP, y2: height - BOTTOM, class: value ? "grid" : "axis" }),
      drawn("text", { x: x(value), y: height - 16, class: "tick", "text-anchor": "middle" }, rounded(value)),
    );
  }
  chart.append(drawn("line", { x1: start, x2: start, y1: TOP, y2: height - BOTTOM, class: "axis" }));
}

function axisName(chart, text, height) {
  chart.append(drawn("text", { x: WIDTH - RIGHT, y: height - 3, class: "tick", "text-anchor": "end" }, text));
}

function line(chart, y, reference) {
  if (reference !== null) {
    chart.append(drawn("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(reference), y2: y(reference), class: "reference" }));
  }
}

function scale(low, high, from, to) {
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  place.most = high;
  return place;
}

/** Round numbers from 0 to `most`, about four of them. */
export function steps(most) {
  const rough = most / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, index) => Number((index * step).toPrecision(6)));
}

function fixed(value) {
  return value.toFixed(1);
}
