// The tree as a drawing: steps as nodes (size by tokens, ring by who wrote their tokens), branches and grafts marked where they arose.
// It is scaled to the room there is, down to what can still be read.

import { hideTip, flat, num, plain, s, showTip, signed } from "./dom.js";
import { author, causeWords, comparison, headline, ORIGINS, refusalWords, shade, STATUS_WORDS } from "./marks.js";

const [CLOSE, LOOSE] = [42, 58]; // rows
const TOP = 22;
const LEFT = 22;
const BAR = 96; // where a leaf's advantage begins
const CHIP = 166;
const STATUS_ROOM = 56;
const [NARROWEST, USUAL, WIDEST] = [70, 114, 190]; // columns
const [SMALLEST, LARGEST] = [0.8, 1.6]; // scales

const radius = (step) => Math.max(4.5, Math.min(14, 2.5 + 1.35 * Math.sqrt(step.num_tokens)));

const between = (low, value, high) => Math.max(low, Math.min(high, value));

// The widths a tree would have with columns as they are best read and as they still can be.
export function widths(tree) {
  const depth = Math.max(1, ...tree.steps.map((step) => step.depth));
  const chip = CHIP + (tree.leaves.some((leaf) => leaf.status !== "completed") ? STATUS_ROOM : 0);
  return { depth, chip, usual: LEFT + depth * USUAL + chip, least: LEFT + depth * NARROWEST + chip };
}

// Larger where there is room for it; smaller only after columns have given way.
function sizes(tree, room) {
  const { depth, chip, usual } = widths(tree);
  const height = TOP + CLOSE * tree.leaves.length;
  const large = between(1, Math.min(room.width / usual, room.height / height), LARGEST);
  const small = between(SMALLEST, room.height / height, large);
  const column = between(NARROWEST, (room.width / small - LEFT - chip) / depth, WIDEST);
  const width = LEFT + depth * column + chip;
  const scale = Math.min(small, Math.max(SMALLEST, room.width / width));
  const row = between(CLOSE, (room.height / scale - TOP) / tree.leaves.length, LOOSE);
  return { column, row, chip, width, scale };
}

function places(tree, room) {
  const { column, row, chip, width, scale } = sizes(tree, room);
  const tools = new Set(tree.steps.flatMap((step) => step.content.calls.map((call) => call.name)));
  const children = new Map();
  for (const step of tree.steps) if (step.parent !== null) children.set(step.parent, [...(children.get(step.parent) ?? []), step.id]);
  const at = new Map();
  let next = 0;
  // Depth first from the back, so that children stand before their parents are placed.
  for (const step of tree.steps) if (!children.has(step.id)) at.set(step.id, { x: LEFT + step.depth * column, y: TOP + row * next++ });
  for (const step of [...tree.steps].reverse()) {
    const below = children.get(step.id);
    if (below) at.set(step.id, { x: LEFT + step.depth * column, y: (at.get(below[0]).y + at.get(below.at(-1)).y) / 2 });
  }
  return { at, column, chip, scale, isOneTool: tools.size === 1, width, height: TOP + row * next };
}

// A dashed circle per origin takes fewer numbers than arcs of a ring.
function ring(step, r) {
  const around = 2 * Math.PI * r;
  const total = Object.values(step.origins).reduce((a, b) => a + b, 0) || 1;
  let done = 0;
  return ORIGINS.filter((name) => step.origins[name]).map((name) => {
    const length = (around * step.origins[name]) / total;
    const arc = s("circle", { r, class: `ring by-${name}`, "stroke-dasharray": `${length} ${around - length}`, "stroke-dashoffset": -done, transform: "rotate(-90)" });
    done += length;
    return arc;
  });
}

// In narrow columns a mark is shortened, so that it does not run into the next; hovering and the transcript show all.
function causeMark(step, column) {
  const cause = step.cause;
  const isBrief = column < 112;
  const mark = (kind, y, text) => s("text", { class: `mark ${kind}`, x: 0, y, "text-anchor": "middle" }, text);
  if (cause?.kind === "branch") return mark("branch", 24, `├ ${comparison(cause, isBrief)}`);
  if (cause?.kind === "graft") return mark("graft", 26, `◆ ${flat(cause.source, Math.max(6, column / 6.5 - 9))}${column < 84 ? "" : ` sim ${num(cause.similarity, 2)}`}`);
  if (!step.decision || step.decision.num_opened) return null;
  if (step.decision.num_wanted) return mark("refused", 24, isBrief ? "⊘ budget" : `⊘ ${comparison(step.decision.seen, true)}, budget`);
  return mark("refused", 24, `⊘ ${comparison(step.decision.seen, isBrief)}`);
}

function node(step, place, column, { isOneTool, isLeaf }) {
  const r = radius(step);
  // Ids grow with depth, so a node shows its last part: 0.4, then .0, is step 0.4.0.
  const part = step.depth < 2 ? step.id : `.${step.id.split(".").at(-1)}`;
  // Nothing stands to the right of a leaf.
  const most = isLeaf ? 24 : Math.max(6, Math.floor((column - r - 11 - 5.2 * part.length) / 6.3));
  const label = step.cause === null ? "prompt" : flat(headline(step, isOneTool), most);
  const graft = step.cause?.kind === "graft";
  return s("g", { class: `node ${step.cause?.kind ?? "root"} by-${step.origin}`, "data-step": step.id, transform: `translate(${place.x},${place.y})`, tabindex: -1 },
    graft && s("rect", { x: -r - 4, y: -r - 4, width: 2 * r + 8, height: 2 * r + 8, rx: 3, class: "graftbox" }),
    s("circle", { r, class: "fill" }), ring(step, r),
    s("text", { class: "label foreign", x: r + 5, y: -6 }, step.cause !== null && s("tspan", { class: "part" }, `${part} `), label),
    causeMark(step, column));
}

function edge(from, to, step) {
  const bend = from.x + (to.x - from.x) * 0.45;
  return s("path", { class: `edge ${step.cause?.kind ?? ""}`, "data-step": step.id, d: `M${from.x},${from.y} C${bend},${from.y} ${bend},${to.y} ${to.x},${to.y}` });
}

const SHORT_STATUS = { truncated: "truncated", format_violation: "violation", failed: "failed" };

function leafEnd(leaf, n, place, step, chip, best, scale) {
  const x = place.x + radius(step) + 8;
  const verdict = leaf.is_correct ? "✓" : leaf.is_correct === false ? "✗" : "·";
  const length = leaf.advantage === null ? 0 : (26 * Math.abs(leaf.advantage)) / scale.advantage;
  const status = leaf.status === "completed" ? "" : ` ${SHORT_STATUS[leaf.status]}`;
  const bar = BAR + chip - CHIP;
  return s("g", { class: `leaf ${leaf.status} ${leaf.is_correct ? "right" : leaf.is_correct === false ? "wrong" : ""}`, "data-leaf": n, transform: `translate(${x},${place.y})` },
    s("rect", { x: -4, y: -2, width: chip - 12, height: 18, rx: 4, class: "hit" }),
    s("text", { x: 0, y: 11, class: "leaftext" }, s("tspan", { class: "leafname" }, `leaf ${n} `), `${verdict} ${leaf.reward === null ? "no reward" : num(leaf.reward)}${status}${n === best ? " ★" : ""}`),
    s("line", { x1: bar, x2: bar, y1: -1, y2: 15, class: "axis" }),
    s("rect", { x: leaf.advantage >= 0 ? bar : bar - length, y: 3, width: length, height: 8, class: "bar" }),
    s("text", { x: bar + 29, y: 11, class: "advantage" }, leaf.advantage === null ? "" : signed(leaf.advantage, 2)));
}

export class Drawing {
  // room: width and height of what it is drawn in
  constructor(tree, { room, scale, onLeaf, onStep }) {
    this.tree = tree;
    this.scale = scale;
    const laid = places(tree, room);
    this.laid = laid;
    const steps = new Map(tree.steps.map((step) => [step.id, step]));
    this.steps = steps;
    const edges = tree.steps.filter((step) => step.parent !== null).map((step) => edge(laid.at.get(step.parent), laid.at.get(step.id), step));
    const ends = new Set(tree.leaves.map((leaf) => leaf.step_id));
    this.nodes = tree.steps.map((step) => node(step, laid.at.get(step.id), laid.column, { isOneTool: laid.isOneTool, isLeaf: ends.has(step.id) }));
    this.ends = tree.leaves.map((leaf, n) => leafEnd(leaf, n, laid.at.get(leaf.step_id), steps.get(leaf.step_id), laid.chip, tree.best, scale));
    this.edges = edges;
    this.element = s("svg", { class: "drawing", width: Math.floor(laid.width * laid.scale), height: Math.floor(laid.height * laid.scale), viewBox: `0 0 ${laid.width} ${laid.height}`, role: "img", "aria-label": `a tree of ${tree.steps.length} steps and ${tree.leaves.length} leaves` }, edges, this.ends, this.nodes);
    this.element.addEventListener("click", (event) => {
      const leaf = event.target.closest("[data-leaf]");
      const step = event.target.closest("[data-step]");
      if (leaf) onLeaf(Number(leaf.dataset.leaf));
      else if (step) onStep(step.dataset.step);
    });
    this.element.addEventListener("mousemove", (event) => {
      const step = event.target.closest?.("[data-step]");
      const leaf = event.target.closest?.("[data-leaf]");
      if (step) showTip(event, this.stepTip(steps.get(step.dataset.step)));
      else if (leaf) showTip(event, this.leafTip(Number(leaf.dataset.leaf)));
      else hideTip();
    });
    this.element.addEventListener("mouseleave", hideTip);
  }

  stepTip(step) {
    const rows = [[`step ${step.id}`], ["written by", author(step)], ["here because", causeWords(step)], ...(refusalWords(step) ? [["branching", refusalWords(step)]] : []), ["tokens", ORIGINS.filter((name) => step.origins[name]).map((name) => `${step.origins[name]} ${name}`).join(", ")]];
    if (step.entropy_mean !== null) rows.push(["entropy, mean and largest", `${step.entropy_mean} · ${step.entropy_max}`]);
    if (step.advantage !== null && step.num_loss) rows.push([step.is_hard ? "advantage (shared)" : "advantage, mean of its leaves", String(step.advantage)]);
    if (step.ratio_mean !== null && step.is_learned) rows.push(["ratio", `${step.ratio_min} to ${step.ratio_max}`]);
    if (step.violation) rows.push(["broke the format", plain(step.violation)]);
    return rows;
  }

  leafTip(n) {
    const leaf = this.tree.leaves[n];
    return [[`leaf ${n}`], ["ended", STATUS_WORDS[leaf.status]], ["reward", String(leaf.reward)], ["advantage", String(leaf.advantage)], ["answer", flat(leaf.answer ?? "none", 80)], ["tokens", String(leaf.num_tokens)]];
  }

  paint(overlay) {
    const scale = { ...this.scale, entropy: this.scale.meanEntropy };
    for (const element of this.nodes) {
      const step = this.steps.get(element.dataset.step);
      const name = overlay === "none" ? "" : shade(overlay, { origin: step.origin, entropy: step.entropy_mean, advantage: step.advantage, ratio: step.is_learned ? step.ratio_mean : null, loss: step.num_loss > 0 }, scale);
      element.querySelector(".fill").setAttribute("class", `fill ${name}`);
    }
  }

  select(leaf, step) {
    const end = this.tree.leaves[leaf]?.step_id ?? "";
    const on = (id) => end === id || end.startsWith(`${id}.`);
    for (const element of [...this.nodes, ...this.edges]) {
      element.classList.toggle("on", on(element.dataset.step));
      element.classList.toggle("sel", element.dataset.step === step);
    }
    this.ends.forEach((element, n) => element.classList.toggle("on", n === leaf));
  }

  // Where a step is drawn, in pixels, for scrolling there.
  place(step) {
    const { x, y } = this.laid.at.get(step);
    return { x: x * this.laid.scale, y: y * this.laid.scale };
  }

  // Leaves that a view of the drawing leaves out: those that begin below it, and those whose numbers end to its right.
  hidden({ right, bottom }) {
    const at = this.tree.leaves.map((leaf) => this.place(leaf.step_id));
    const numbers = [...at.keys()];
    return {
      below: numbers.filter((n) => at[n].y + 14 * this.laid.scale > bottom),
      right: numbers.filter((n) => at[n].x + this.laid.chip * this.laid.scale > right + 4),
    };
  }
}
