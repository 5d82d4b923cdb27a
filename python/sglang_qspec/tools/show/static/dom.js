// Creates elements without parsing HTML, so text never becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `attributes` that are null or false are left out; children are nodes or texts. */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element, with the arguments of `element`. */
export function drawn(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** A number with at most `digits` digits after the point. */
export function rounded(value, digits = 2) {
  return String(Number(value.toFixed(digits)));
}

export function percent(value) {
  return `${Math.round(100 * value)} %`;
}

export function milliseconds(ms) {
  return ms < 1000 ? `${rounded(ms, ms < 10 ? 1 : 0)} ms` : `${rounded(ms / 1000)} s`;
}

/** A count with its noun. */
export function counted(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : /(s|ch)$/.test(noun) ? "es" : "s"}`;
}

/** A token's text on one line, with its white space visible. */
export function visible(text) {
  if (text === "") return "∅";
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣");
}
