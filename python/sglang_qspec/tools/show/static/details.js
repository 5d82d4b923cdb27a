// One pass in detail: what matched, the draft tree, what was accepted, rows and time.
import { counted, drawn, element, milliseconds, percent, visible } from "./dom.js";

const [ROW, HEIGHT, GAP, LETTER, MOST] = [50, 38, 18, 7.3, 18];
const LONGEST = 32;

/** The details of the pass that emitted a token. */
export function details(answer, token) {
  const index = answer.passOf[token];
  if (index === undefined) {
    const { source, text } = answer.tokens[token];
    const isOmitted = answer.end?.omitted_passes && token >= answer.totals.last;
    const gave = isOmitted ? "The trace was full before this token's pass." : "A pass over the prompt gave this token.";
    const why = answer.end ? gave : "The passes come with the end of the answer.";
    return element("div", {}, element("h3", {}, `Token ${token + 1}: ${visible(text)}`), element("p", {}, `${why} Source: ${source}.`));
  }
  const one = answer.passes[index];
  const last = one.start + one.tokens;
  const range = one.tokens === 1 ? `token ${last}` : `tokens ${one.start + 1} to ${last}`;
  return element(
    "div",
    {},
    element("h3", {}, `Pass ${index + 1} of ${answer.passes.length}: ${range}`),
    element("p", { class: "facts" }, facts(one)),
    element("p", { class: "match" }, ...match(one)),
    one.tree.ids.length ? scrolled(tree(answer, one)) : null,
    element("p", { class: "outcome" }, outcome(answer, one)),
  );
}

function facts(one) {
  const parts = [counted(one.rows, "row"), one.ms == null ? "no time measured" : milliseconds(one.ms), `pipeline ${one.pipeline}`];
  if (one.batch_requests > 1) parts.push(`with ${counted(one.batch_requests - 1, "other request")}, ${one.batch_rows} rows in all`);
  return parts.join(" · ");
}

function match(one) {
  if (!one.match) return ["No n-gram of the context matched a draft."];
  return ["Matched ", element("strong", {}, matched(one.match.length)), " of the context: ", element("q", {}, visible(one.match.text ?? "?"))];
}

/** The server counts at most LONGEST tokens of a match. */
function matched(length) {
  return length < LONGEST ? counted(length, "token") : `${length} tokens or more`;
}

/** What the pass did, as a sentence. */
function outcome(answer, one) {
  const { ids, texts, accepted } = one.tree;
  if (!ids.length) return "Nothing was drafted, so the target gave one token.";
  const right = texts.filter((_, node) => accepted[node]).map(visible);
  const wrong = texts.filter((_, node) => !accepted[node]).map(visible);
  const parts = [right.length ? `Accepted: ${right.join(" ")}.` : "Nothing was accepted."];
  if (wrong.length) parts.push(`Not accepted: ${wrong.join(" ")}.`);
  if (ownToken(one)) parts.push(`Then the target's own: ${visible(answer.tokens[one.start + one.tokens - 1]?.text ?? "")}.`);
  return parts.join(" ");
}

/** Whether the pass ended with a token of the target; a stop can cut it off. */
function ownToken(one) {
  return one.tokens > one.tree.accepted.filter(Boolean).length;
}

function scrolled(picture) {
  return element("div", { class: "scrolled", tabindex: "0", role: "group", "aria-label": "draft tree" }, picture);
}

/** The tree from left to right: the last known token, the drafts, and the target's own token. */
function tree(answer, one) {
  const nodes = placed(answer, one);
  const widths = [];
  for (const node of nodes) widths[node.depth] = Math.max(widths[node.depth] ?? 0, node.width);
  const lefts = widths.map((_, depth) => 2 + widths.slice(0, depth).reduce((sum, width) => sum + width + GAP, 0));
  const total = lefts[lefts.length - 1] + widths[widths.length - 1] + 2;
  const lanes = 1 + Math.max(...nodes.map((node) => node.lane));
  const height = lanes * ROW;
  const label = `${one.tree.ids.length} drafted tokens in ${counted(lanes, "branch")}`;
  const picture = drawn("svg", { width: total, height, viewBox: `0 0 ${total} ${height}`, class: "tree", role: "img", "aria-label": label });
  for (const node of nodes) {
    if (node.parent) picture.append(edge(node, lefts));
  }
  for (const node of nodes) picture.append(drawnNode(node, lefts[node.depth]));
  return picture;
}

/** The nodes with depth and lane. A node's first child has its lane, and accepted nodes come first. */
function placed(answer, one) {
  const { texts, parents, sources, chances, accepted } = one.tree;
  const before = one.start > 0 ? visible(answer.tokens[one.start - 1]?.text ?? "") : "prompt";
  const root = sized({ text: before, kind: "root", depth: 0, lane: 0 });
  const children = new Map([[-1, []]]);
  texts.forEach((_, node) => children.set(node, []));
  parents.forEach((parent, node) => children.get(parent).push(node));
  const found = [root];
  let lanes = 1;
  let tip = root;
  const visit = (index, parent) => {
    const order = [...children.get(index)].sort((a, b) => accepted[b] - accepted[a] || chances[b] - chances[a]);
    let lane = parent.lane;
    for (const child of order) {
      const note = `${accepted[child] ? "✓" : "✗"} ${percent(chances[child])} ${sources[child]}`;
      const node = sized({ text: visible(texts[child]), note, source: sources[child], chance: chances[child], kind: accepted[child] ? "accepted" : "rejected", depth: parent.depth + 1, lane: lane ?? lanes++, parent });
      lane = null;
      found.push(node);
      if (accepted[child] && node.depth > tip.depth) tip = node;
      visit(child, node);
    }
  };
  visit(-1, root);
  if (ownToken(one)) {
    const text = visible(answer.tokens[one.start + one.tokens - 1]?.text ?? "");
    const taken = found.some((node) => node.parent === tip && node.lane === tip.lane);
    found.push(sized({ text, note: "target", source: "target", kind: "own", depth: tip.depth + 1, lane: taken ? lanes++ : tip.lane, parent: tip }));
  }
  return found;
}

function sized(node) {
  const shown = node.text.length > MOST ? `${node.text.slice(0, MOST - 1)}…` : node.text;
  const width = 14 + Math.max(LETTER * [...shown].length, 5.6 * (node.note?.length ?? 0), 20);
  return { ...node, shown, width };
}

function edge(node, lefts) {
  const { parent } = node;
  const x1 = lefts[parent.depth] + parent.width;
  const x2 = lefts[node.depth];
  const [y1, y2] = [parent.lane, node.lane].map((lane) => lane * ROW + HEIGHT / 2 + 2);
  const middle = x2 - GAP / 2;
  return drawn("path", { d: `M${x1} ${y1}H${middle}V${y2}H${x2}`, class: `edge ${node.kind}` });
}

function drawnNode(node, left) {
  const top = node.lane * ROW + 2;
  const group = drawn("g", { class: `node ${node.kind} ${node.source ?? ""}`, transform: `translate(${left} ${top})` });
  group.append(
    drawn("title", {}, node.note ? `${node.text} (${node.note})` : node.text),
    drawn("rect", { width: node.width, height: HEIGHT, rx: 5 }),
    drawn("text", { x: 7, y: node.note ? 15 : 23, class: "word" }, node.shown),
  );
  if (node.note) group.append(drawn("text", { x: 7, y: 28, class: "note" }, node.note));
  if (node.chance !== undefined) {
    group.append(drawn("rect", { x: 5, y: HEIGHT - 6, width: Math.max(1, node.chance * (node.width - 10)), height: 3, class: "chance" }));
  }
  return group;
}
