// An answer as its events build it: tokens with their sources, passes with their trees, and figures.

import { SOURCES } from "./sources.js";

export class Answer {
  constructor() {
    this.tokens = []; // {text, source}
    this.passes = []; // as in meta_info.qspec_trace
    this.passOf = []; // index of a token's pass; undefined for a token of the prompt's pass
    this.ends = []; // per pass, milliseconds from the first pass to its end
    this.curves = { rate: [], length: [] }; // [tokens, value] after each pass
    this.totals = { proposed: 0, accepted: 0, emitted: 0, last: 0 }; // last: tokens up to the last pass
    this.end = null;
    this.error = null;
  }

  /** Apply one event of the server; see show/question.py. */
  add(event) {
    (event.tokens ?? []).forEach(([text, source], offset) => {
      const index = event.first + offset;
      if (index < this.tokens.length) this.tokens[index].text += text;
      else this.tokens.push({ text, source });
    });
    for (const one of event.passes ?? []) this.#addPass(one);
    if (event.end) this.end = event.end;
    if (event.error) this.error = event.error;
  }

  #addPass(one) {
    const { totals } = this;
    one.tree.texts ??= one.tree.ids.map(String); // a server without a tokenizer sends none
    const index = this.passes.push(one) - 1;
    for (let token = one.start; token < one.start + one.tokens; token += 1) this.passOf[token] = index;
    totals.proposed += one.tree.ids.length;
    totals.accepted += one.tree.accepted.filter(Boolean).length;
    totals.emitted += one.tokens;
    totals.last = one.start + one.tokens;
    this.ends.push((this.ends[index - 1] ?? 0) + (one.ms ?? 0));
    if (totals.proposed) this.curves.rate.push([totals.last, totals.accepted / totals.proposed]);
    this.curves.length.push([totals.last, totals.emitted / (index + 1)]);
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Number of tokens of each source. */
  counts() {
    const found = Object.fromEntries(SOURCES.map((source) => [source, 0]));
    for (const token of this.tokens) found[token.source] = (found[token.source] ?? 0) + 1;
    return found;
  }

  /** Events that build this answer again. */
  events() {
    const tokens = this.tokens.map((token) => [token.text, token.source]);
    return [{ first: 0, tokens, passes: this.passes }, { end: this.end, error: this.error }];
  }
}

/** An answer without speculation, which is only text. */
export class PlainAnswer {
  constructor() {
    this.text = "";
    this.end = null;
    this.error = null;
  }

  add(event) {
    this.text += event.text ?? "";
    if (event.end) this.end = event.end;
    if (event.error) this.error = event.error;
  }

  events() {
    return [{ text: this.text }, { end: this.end, error: this.error }];
  }
}

/** Tokens per second after the first token; null for one token. */
export function decodeRate(end) {
  const seconds = end.seconds - end.first_seconds;
  return end.tokens > 1 && seconds > 0 ? (end.tokens - 1) / seconds : null;
}
