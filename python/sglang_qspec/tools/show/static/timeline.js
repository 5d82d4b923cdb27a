// All passes over time: a bar for each, as wide as its time and as high as its tokens, in the colours of their sources.
import { SOURCES } from "./sources.js";
import { counted, drawn, element, milliseconds } from "./dom.js";

const [TALL, ABOVE] = [64, 6];

export class Timeline {
  /** `onSelect` gets the index of a pass. */
  constructor(answer, onSelect) {
    this.answer = answer;
    this.onSelect = onSelect;
    this.chosen = 0;
    this.bars = drawn("g");
    this.cursor = drawn("rect", { class: "cursor", y: 0, height: TALL + ABOVE, visibility: "hidden" });
    this.picture = drawn("svg", { class: "bars", height: TALL + ABOVE, preserveAspectRatio: "none", "aria-hidden": "true" }, this.bars, this.cursor);
    this.slider = element("div", { class: "slider", role: "slider", tabindex: "0", "aria-label": "pass", "aria-valuemin": "1" }, this.picture);
    this.begin = element("span", {}, "0");
    this.middle = element("span", {}, "");
    this.finish = element("span", {}, "");
    this.root = element("div", { class: "timeline" }, this.slider, element("div", { class: "scale" }, this.begin, this.middle, this.finish));
    this.slider.addEventListener("pointermove", (event) => this.#pointed(event));
    this.slider.addEventListener("pointerdown", (event) => this.#pointed(event));
    this.slider.addEventListener("keydown", (event) => this.#pressed(event));
    new ResizeObserver(() => this.update()).observe(this.slider);
  }

  /** Draw all passes. */
  update() {
    const { answer } = this;
    const { passes, ends } = answer;
    const width = Math.max(1, this.slider.clientWidth);
    this.picture.setAttribute("width", width);
    if (!passes.length) return;
    const most = Math.max(...passes.map((one) => one.tokens));
    const paths = Object.fromEntries(SOURCES.map((source) => [source, ""]));
    passes.forEach((one, index) => {
      const [left, right] = this.#edges(index, width);
      const wide = Math.max(0.4, right - left - (right - left > 3 ? 1 : 0));
      let bottom = ABOVE + TALL;
      for (const [source, count] of stacked(answer, one)) {
        const high = (count / most) * TALL;
        bottom -= high;
        paths[source] += `M${left.toFixed(2)} ${bottom.toFixed(2)}h${wide.toFixed(2)}v${high.toFixed(2)}h${(-wide).toFixed(2)}z`;
      }
    });
    this.bars.replaceChildren(...SOURCES.map((source) => drawn("path", { class: `bar ${source}`, d: paths[source] })));
    this.middle.textContent = `${counted(passes.length, "pass")}, at most ${counted(most, "token")} each`;
    this.finish.textContent = milliseconds(ends[ends.length - 1]);
    this.slider.setAttribute("aria-valuemax", passes.length);
    this.mark(Math.min(this.chosen, passes.length - 1), this.cursor.getAttribute("visibility") === "visible");
  }

  /** Mark a pass. */
  mark(index, isVisible = true) {
    const one = this.answer.passes[index];
    if (!one) return;
    this.chosen = index;
    const [left, right] = this.#edges(index, this.slider.clientWidth);
    this.cursor.setAttribute("x", left - 1);
    this.cursor.setAttribute("width", Math.max(3, right - left + 1));
    this.cursor.setAttribute("visibility", isVisible ? "visible" : "hidden");
    this.slider.setAttribute("aria-valuenow", index + 1);
    const time = one.ms == null ? "" : `, ${milliseconds(one.ms)}`;
    this.slider.setAttribute("aria-valuetext", `pass ${index + 1} of ${this.answer.passes.length}: ${counted(one.tokens, "token")}${time}`);
  }

  /** Left and right edge of a pass, in pixels. Passes without times are equally wide. */
  #edges(index, width) {
    const { ends } = this.answer;
    const total = ends[ends.length - 1];
    if (!total) return [index, index + 1].map((place) => (place * width) / ends.length);
    return [(ends[index - 1] ?? 0) / total, ends[index] / total].map((part) => part * width);
  }

  #pointed(event) {
    const { passes } = this.answer;
    if (!passes.length) return;
    const x = event.clientX - this.slider.getBoundingClientRect().left;
    let [low, high] = [0, passes.length - 1];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#edges(middle, this.slider.clientWidth)[1] < x) low = middle + 1;
      else high = middle;
    }
    this.onSelect(low);
  }

  #pressed(event) {
    const last = this.answer.passes.length - 1;
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10, Home: -last, End: last };
    if (!(event.key in steps) || last < 0) return;
    event.preventDefault();
    this.onSelect(Math.min(last, Math.max(0, this.chosen + steps[event.key])));
  }
}

/** The number of tokens of a pass by source, the target's last. */
function stacked(answer, one) {
  const counts = new Map(SOURCES.map((source) => [source, 0]));
  for (let token = one.start; token < one.start + one.tokens; token += 1) {
    const source = answer.tokens[token]?.source ?? "target";
    counts.set(source, (counts.get(source) ?? 0) + 1);
  }
  return [...counts].filter(([, count]) => count);
}
