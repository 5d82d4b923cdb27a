// The answer as tokens that can be pointed at, and walked through with the arrow keys.
import { element } from "./dom.js";

export class Tokens {
  /** `onSelect` gets the index of a token. */
  constructor(answer, onSelect) {
    this.answer = answer;
    this.onSelect = onSelect;
    this.root = element("div", { class: "tokens", role: "group", "aria-label": "answer by tokens; arrow keys move, up and down by pass" });
    this.spans = [];
    this.marked = [];
    this.selected = null;
    this.shownPasses = 0;
    // Not pointerover, which also fires when the page scrolls below a pointer that rests. A finger taps.
    this.root.addEventListener("pointermove", (event) => event.pointerType === "touch" || this.#pointed(event));
    this.root.addEventListener("focusin", (event) => this.#pointed(event));
    this.root.addEventListener("click", (event) => event.target.closest(".token")?.focus());
    this.root.addEventListener("keydown", (event) => this.#pressed(event));
  }

  /** Show the tokens and passes that are new. */
  update() {
    const { tokens, passes } = this.answer;
    // The last token shown may have got more text.
    for (let index = Math.max(0, this.spans.length - 1); index < tokens.length; index += 1) {
      const { text, source } = tokens[index];
      if (index === this.spans.length) this.#append(index, source, tokens[index - 1]?.source);
      const span = this.spans[index];
      if (span.textContent !== text) span.textContent = text;
      span.classList.toggle("break", /^\s*\n\s*$/.test(text));
      span.classList.toggle("empty", text === "");
    }
    for (; this.shownPasses < passes.length; this.shownPasses += 1) {
      const span = this.spans[passes[this.shownPasses].start];
      if (!span) break;
      span.classList.add("begin");
    }
  }

  #append(index, source, before) {
    const begins = source === before ? "" : " run";
    const span = element("span", { class: `token ${source}${begins}`, "data-index": index, "data-letter": source[0], tabindex: index ? "-1" : "0", role: "button" });
    this.spans.push(span);
    this.root.append(span);
  }

  /** Mark a token, its pass and the n-gram that matched. */
  mark(token) {
    for (const span of this.marked) span.classList.remove("chosen", "same-pass", "matched");
    this.marked = [];
    if (this.selected !== null) this.spans[this.selected].tabIndex = -1;
    this.selected = token;
    this.spans[token].tabIndex = 0;
    if (token && this.spans[0]) this.spans[0].tabIndex = -1;
    this.#add(token, token + 1, "chosen");
    const one = this.answer.passes[this.answer.passOf[token]];
    if (!one) return;
    this.#add(one.start, one.start + one.tokens, "same-pass");
    if (one.match) this.#add(Math.max(0, one.start - one.match.length), one.start, "matched");
  }

  #add(from, to, name) {
    for (const span of this.spans.slice(from, to)) {
      span.classList.add(name);
      this.marked.push(span);
    }
  }

  #pointed(event) {
    const span = event.target.closest(".token");
    if (span) this.onSelect(Number(span.dataset.index));
  }

  #pressed(event) {
    const next = this.#target(event.key);
    if (next === null) return;
    event.preventDefault();
    this.spans[Math.min(Math.max(next, 0), this.spans.length - 1)]?.focus();
  }

  #target(key) {
    const here = this.selected ?? 0;
    const { passes, passOf } = this.answer;
    const pass = passOf[here];
    switch (key) {
      case "ArrowRight":
        return here + 1;
      case "ArrowLeft":
        return here - 1;
      case "ArrowDown":
        return passes[(pass ?? -1) + 1]?.start ?? this.spans.length - 1;
      case "ArrowUp":
        return pass ? passes[pass - 1].start : 0;
      case "Home":
        return 0;
      case "End":
        return this.spans.length - 1;
      default:
        return null;
    }
  }
}
