// The tree as a drawing: a row for each leaf, with its results in columns at the right edge; equal steps stand once, with their number.

import { flat, h, hideTip, num, plain, plural, s, score, showTip } from "./dom.js";
import { edge, fold, place, rows, wish } from "./layout.js";
import { author, brief, causeWords, headline, icon, isDrawn, ORIGINS, outcome, refusal, refusalWords, shade, STATUS_WORDS } from "./marks.js";

const HEAD = 28;
const [ICON, SPACE] = [12, 5];
const LEAST_LABEL = 44;
const [TIGHT_BAR, BAR, WIDE_BAR] = [40, 52, 76];
const DEEP = 9; // steps
const [NARROW, NARROW_LINES] = [54, 3]; // a box that holds a word, or less
const NARROW_WINDOW = 600;
const [SMALL, CLOSER] = [12, 0.5]; // letters of the number of equal steps in a narrow box, and how much closer they stand, as tree.css has them

// Widths of texts as the browser will draw them.
function measure(size) {
  const context = document.createElement("canvas").getContext("2d");
  const family = getComputedStyle(document.body).fontFamily;
  const known = new Map();
  return (text, weight = 400) => {
    const key = `${weight} ${text}`;
    if (!known.has(key)) {
      context.font = `${weight} ${size}px ${family}`;
      known.set(key, Math.ceil(context.measureText(text).width) + 1);
    }
    return known.get(key);
  };
}

// How many letters of a text fit.
function fitting(letters, room, width, end = "") {
  let [low, high] = [0, letters.length];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (width(letters.slice(0, middle).join("").trimEnd() + end) <= room) low = middle;
    else high = middle - 1;
  }
  return low;
}

// The longest beginning of a text that fits.
function cut(text, room, width) {
  if (width(text) <= room) return text;
  const letters = [...text];
  const count = fitting(letters, room, width, "…");
  return count ? `${letters.slice(0, count).join("").trimEnd()}…` : "";
}

// A text in at most so many lines, the last one cut. A word that is longer than a line goes on in the next one.
function wrap(text, roomOf, most, width) {
  const found = [];
  let rest = text;
  while (rest && found.length < most) {
    const room = roomOf(found.length);
    if (found.length === most - 1) return [...found, cut(rest, room, width)];
    const words = rest.split(" ");
    let count = 0;
    while (count < words.length && width(words.slice(0, count + 1).join(" ")) <= room) count++;
    if (count === 0 && width(words[0]) > roomOf(found.length + 1)) {
      const letters = [...rest];
      const letterCount = fitting(letters, room, width);
      found.push(letters.slice(0, letterCount).join(""));
      rest = letters.slice(letterCount).join("");
    } else {
      found.push(words.slice(0, count).join(" "));
      rest = words.slice(count).join(" ");
    }
  }
  return found;
}

// A text in at most so many lines without breaking a word; null where it does not fit: half an id is another id.
function whole(text, roomOf, most, width) {
  const found = [];
  for (const word of text.split(" ")) {
    const longer = found.length ? `${found.at(-1)} ${word}` : word;
    if (found.length && width(longer) <= roomOf(found.length - 1)) found[found.length - 1] = longer;
    else if (found.length < most && width(word) <= roomOf(found.length)) found.push(word);
    else return null;
  }
  return found;
}

const isBelow = (leaf, ids) => ids.some((id) => `${leaf.step_id}.`.startsWith(`${id}.`));

export class Drawing {
  // room: gives the width and the height of what it is drawn in, from the width that the drawing would like; folding: as in `fold`
  constructor(tree, { room, scale, folding, onLeaf, onStep, onUnfold }) {
    this.tree = tree;
    this.scale = scale;
    this.steps = new Map(tree.steps.map((step) => [step.id, step]));
    const tools = new Set(tree.steps.flatMap((step) => step.content.calls.map((call) => call.name)));
    this.isOneTool = tools.size === 1;
    this.hasLoss = tree.steps.some((step) => step.num_loss > 0);
    const { nodes, num } = rows(fold(tree, folding));
    this.nodes = nodes;
    for (const node of nodes) this.describe(node);
    this.ends = nodes.filter((node) => node.leaves.length);
    this.size = innerWidth >= 2200 ? 16 : innerWidth >= 1800 ? 14 : 12.5;
    this.line = Math.round(1.36 * this.size);
    this.width = measure(this.size);
    const isNarrow = innerWidth < NARROW_WINDOW;
    this.side = this.columns(isNarrow);
    this.sideWidth = this.side.reduce((sum, one) => sum + one.width, 0) + (isNarrow ? 6 : 14);
    const sizes = { side: this.sideWidth, head: HEAD, line: this.line, narrow: NARROW, widthOf: (node) => this.full(node), linesOf: (node, inside, isDots) => this.wanted(node, inside, isDots) };
    this.laid = place({ nodes, num }, { room: room(wish(nodes, sizes)), ...sizes });
    this.element = this.build();
    this.listen({ onLeaf, onStep, onUnfold });
  }

  // ---- what a node says

  describe(node) {
    const { step } = node;
    const steps = node.ids.map((id) => this.steps.get(id));
    node.steps = steps;
    node.below = this.tree.leaves.filter((leaf) => isBelow(leaf, node.ids));
    node.kind = step.cause?.kind ?? "root";
    // Steps that are not learned from, where others are.
    node.look = `${node.kind} by-${step.origin}${this.hasLoss && node.depth && steps.every((one) => !one.num_loss) ? " noloss" : ""}`;
    const { answer, observations, thought } = step.content;
    node.text = step.cause === null ? "" : flat(headline(step, this.isOneTool), 400);
    node.brief = answer === null || answer === undefined ? node.text : flat(answer, 400);
    node.second = flat(observations.length ? observations.map((seen) => seen.text).join(" ") : node.text.includes(flat(thought, 60)) ? "" : thought, 400);
    node.marks = [
      node.kind === "branch" && { name: "branch", text: isDrawn(step) ? "drawn" : `P ${brief(step.cause.probability).slice(1)}` },
      node.kind === "retry" && { name: "branch", text: "forced" },
      node.kind === "graft" && { name: "graft" },
      step.content.observations.some((seen) => seen.is_error) && node.kind !== "graft" && { name: "error" },
    ].filter(Boolean);
    const why = steps.map(refusal).find(Boolean);
    node.after = why ? { name: why } : null;
    // How many leaves a row stands for is said in the leaves' columns.
    node.times = node.ids.length > 1 && node.children.length ? `×${node.ids.length}` : "";
  }

  // Of the marks of a node, with the number of equal steps; `isFull`: and with their own numbers; `isSmall`: as in a narrow box.
  marksWidth(node, isFull, isSmall = false) {
    const numbers = node.marks.reduce((sum, mark) => sum + (mark.text ? this.width(mark.text) + 3 : 0), 0);
    const icons = (ICON + SPACE) * (node.marks.length + (node.after ? 1 : 0));
    return icons + (isFull ? numbers : 0) + (node.times ? (isSmall ? this.smallTimes(node) : this.width(node.times, 600) + 8) + SPACE : 0);
  }

  // 1 where the number of equal steps needs a line of its own below the marks.
  isStacked = (node, inside) => (node.times && node.marks.length && this.marksWidth(node, false, true) - SPACE > inside ? 1 : 0);

  smallTimes = (node) => Math.ceil((SMALL / this.size) * (this.width(node.times) - 1) - CLOSER * node.times.length);

  full(node) {
    return this.marksWidth(node, true) + Math.max(this.width(node.text), Math.min(this.width(node.second), 150));
  }

  // Lines for all that a node says, about: words do not break evenly.
  wanted(node, inside, isDots) {
    if (isDots) return this.inDot(node, inside - 4) === "both" ? 2 : 1;
    const lines = (width) => Math.ceil((1.08 * width) / Math.max(1, inside));
    if (inside < NARROW) return Math.min(NARROW_LINES + this.isStacked(node, inside), (node.marks.length || node.times ? 1 : 0) + this.isStacked(node, inside) + lines(this.width(node.brief)));
    return lines(this.marksWidth(node, false) + this.width(node.brief)) + lines(this.width(node.second));
  }

  // What a box without words has to show, in a width: "beside", "both" (one below the other), "mark", "times" or nothing.
  inDot(node, width) {
    const needed = this.smallTimes(node);
    const [mark, times] = [node.marks.length > 0 && width >= ICON, node.times !== "" && width >= needed];
    if (!mark || !times) return mark ? "mark" : times ? "times" : "";
    return width >= ICON + 2 + needed ? "beside" : "both";
  }

  // ---- the columns at the right

  columns(isNarrow) {
    const margin = isNarrow ? 6 : 10;
    const { leaves } = this.tree;
    const times = (node) => (node.leaves.length > 1 ? `×${node.leaves.length}` : "");
    const least = (title, texts, weight) => Math.max(this.width(title), ...texts.map((text) => this.width(text, weight))) + margin;
    const own = (node) => node.leaves.map((n) => leaves[n]);
    const via = (node) => ["graft", "branch"].filter((kind) => own(node).some((leaf) => leaf[kind === "graft" ? "num_grafts" : "num_branches"]));
    const hasVia = !isNarrow && this.ends.some((node) => via(node).length);
    const many = Math.max(0, ...this.ends.map((node) => (times(node) ? this.width(times(node), 600) + (isNarrow ? 4 : 12) : 0)));
    const verdict = (leaf) => `${outcome(leaf).glyph} ${isNarrow ? outcome(leaf).short ?? outcome(leaf).word : outcome(leaf).word}`;
    const advantage = (leaf) => score(leaf.advantage, true);
    // Where many steps share little room, it goes to them.
    const isTight = innerWidth < 1800 && Math.max(0, ...this.nodes.map((node) => node.depth)) >= DEEP;
    const bar = isNarrow ? 0 : innerWidth >= 1800 ? WIDE_BAR : isTight ? TIGHT_BAR : BAR;
    const numbers = Math.max(0, ...leaves.map((leaf) => this.width(advantage(leaf), 600)));
    const short = isNarrow || isTight ? "adv." : "advantage";
    const [figures, signs] = [Math.max(numbers, this.width(short)), bar > 0 && h("i", { class: "signs", title: "left: less likely; right: more likely" }, h("b", null, "−"), h("b", null, "+"))];
    signs && signs.style.setProperty("width", `${bar - 4}px`);
    const right = (element) => { element.style.setProperty("width", `${figures}px`); return element; };
    return [
      { title: "leaf", kind: "name", width: Math.max(this.width("leaf"), this.width(String(Math.max(0, leaves.length - 1)), 600) + many) + margin, of: (leaf, node) => [String(node.leaves[0]), times(node) && h("span", { class: "times", "data-unfold": node.step.id, title: "unfold the equal leaves" }, times(node))] },
      ...(hasVia ? [{ title: "via", kind: "via", width: Math.max(this.width("via"), 2 * ICON + 4) + margin, of: (leaf, node) => via(node).map(icon) }] : []),
      { title: isNarrow ? "" : "outcome", kind: "outcome", width: Math.max(isNarrow ? 0 : this.width("outcome"), ...leaves.map((leaf) => this.width(verdict(leaf), 700) + (isNarrow ? 8 : 12))) + margin, of: (leaf) => h("span", { class: "verdict" }, verdict(leaf)) },
      { title: isNarrow ? "rew." : "reward", kind: "number", width: least(isNarrow ? "rew." : "reward", leaves.map((leaf) => score(leaf.reward)), 600), of: (leaf) => score(leaf.reward) },
      { title: [signs, right(h("span", null, short))], kind: "advantage", width: figures + bar + margin, of: (leaf) => [bar > 0 && this.bar(leaf.advantage, bar), right(h("span", null, advantage(leaf)))] },
    ];
  }

  bar(advantage, width) {
    const length = advantage === null ? 0 : (width / 2 - 3) * Math.min(1, Math.abs(advantage) / this.scale.advantage);
    const middle = width / 2 - 2;
    return s("svg", { class: "bar", width: width - 4, height: 12, "aria-hidden": "true" },
      length > 0 && s("rect", { class: advantage > 0 ? "up" : "down", x: advantage > 0 ? middle : middle - length, y: 1, width: length, height: 10, rx: 1.5 }),
      s("line", { x1: middle, x2: middle, y1: 0, y2: 12 }));
  }

  // ---- elements

  build() {
    const { laid } = this;
    const grid = this.side.map((one) => `${one.width}px`).join(" ");
    const put = (element, styles) => {
      for (const [name, value] of Object.entries(styles)) element.style.setProperty(name, typeof value === "number" ? `${value}px` : value);
      return element;
    };
    const cells = (make) => put(h("div", { class: "ends" }, this.side.map(make)), { "grid-template-columns": grid, width: this.sideWidth });
    const depths = laid.starts.slice(1, -1).map((x, n) => put(h("span", { class: "depth" }, laid.isDots ? (n % 3 ? "" : String(n + 1)) : n ? String(n + 1) : laid.starts[2] - laid.starts[1] > this.width("step 1") + 8 ? "step 1" : "1"), { left: x }));
    const head = put(h("div", { class: "head", "aria-hidden": "true" }, depths, cells((one) => h("span", { class: one.kind }, one.title))), { height: HEAD, width: laid.width });
    this.rows = this.ends.map((node) => this.row(node, cells, put));
    const links = this.nodes.filter((node) => node.parent).map((node) => s("path", { class: `edge ${node.kind}`, d: edge(laid.at.get(node.parent), laid.at.get(node), laid.gap) }));
    this.links = new Map(this.nodes.filter((node) => node.parent).map((node, n) => [node, links[n]]));
    this.boxes = new Map(this.nodes.map((node) => [node, this.box(node, put)]));
    const svg = s("svg", { class: "edges", width: laid.width, height: laid.height, "aria-hidden": "true" }, links);
    const label = `a tree of ${plural(this.tree.steps.length, "step")} and ${plural(this.tree.leaves.length, "leaf", "leaves")}`;
    return put(h("div", { class: `drawing${laid.isDots ? " dots" : ""}`, role: "group", "aria-label": label }, head, this.rows, svg, [...this.boxes.values()]), { width: laid.width, height: laid.height, "font-size": this.size, "--text-line": this.line });
  }

  row(node, cells, put) {
    const { laid } = this;
    const at = laid.at.get(node);
    const leaf = this.tree.leaves[node.leaves[0]];
    const { name, word } = outcome(leaf);
    const left = at.x + at.width + 6;
    const lead = laid.width - this.sideWidth - 4 - left;
    const said = `leaf ${node.leaves.join(", ")}: ${word}, reward ${score(leaf.reward)}, advantage ${score(leaf.advantage, true)}`;
    return put(h("div", { class: `leaf ${name}`, "data-leaf": node.leaves[0], role: "button", tabindex: 0, "aria-label": said },
      lead > 8 && put(h("i", { class: "lead" }), { left, width: lead }), cells((one) => h("span", { class: one.kind }, one.of(leaf, node)))),
    { top: HEAD + laid.row * node.row, height: laid.row, width: laid.width });
  }

  box(node, put) {
    const { laid } = this;
    const at = laid.at.get(node);
    const common = { left: at.x, width: at.width };
    const { step } = node;
    const props = { class: `node ${node.look}`, "data-step": step.id, role: "button", tabindex: 0, "aria-label": this.stepTip(node).map((row) => row.join(": ")).join("; ") };
    if (node.depth === 0) return put(h("div", props), { ...common, top: at.y - 6, height: 12 });
    const isNarrow = laid.isDots || at.inside < NARROW;
    const times = node.times && h("span", { class: isNarrow ? "times small" : "times", "data-unfold": step.id, title: "unfold the equal steps" }, node.times);
    if (laid.isDots) {
      const shown = this.inDot(node, at.width - 4);
      const isTall = laid.row >= ICON + this.line + 10;
      const height = Math.min(laid.row - 5, Math.max(at.width + 6, shown === "both" ? ICON + this.line + 4 : 0));
      return put(h("div", props, (shown === "mark" || shown === "beside" || (shown === "both" && isTall)) && icon(node.marks[0].name), shown !== "mark" && shown && times),
        { ...common, top: at.y - height / 2, height, "flex-direction": shown === "beside" ? "row" : "column" });
    }
    const room = (isFull) => Math.max(0, at.inside - this.marksWidth(node, isFull, isNarrow));
    const isFull = !isNarrow && room(true) >= Math.min(LEAST_LABEL, this.width(node.brief));
    const lines = isNarrow ? this.narrowLines(node, room(false), at.inside) : this.lines(node, room(isFull), at.inside);
    const marks = node.marks.map((mark) => h("span", { class: `mark ${mark.name}` }, icon(mark.name), isFull && mark.text && h("span", null, mark.text)));
    const after = node.after && h("span", { class: `mark ${node.after.name}` }, icon(node.after.name));
    const isStacked = isNarrow && this.isStacked(node, at.inside) > 0;
    // Without a second line the number alone is drawn: colour and edge still say what the step is.
    const isBoth = !isStacked || laid.lines > 1;
    const first = [isBoth && marks, lines[0]?.text && h("span", { class: "words foreign" }, lines[0].text), !isStacked && after, (!isStacked || !isBoth) && times];
    const height = Math.min(laid.row - 4, Math.max(isStacked && isBoth ? 2 : 1, lines.length) * this.line + 7);
    return put(h("div", props, h("div", { class: "line" }, first), isStacked && isBoth && h("div", { class: "line" }, times), lines.slice(1 + (isStacked ? 1 : 0)).map((line) => h("div", { class: `line foreign${line.isSecond ? " second" : ""}` }, h("span", null, line.text)))),
    { ...common, top: at.y - height / 2, height, padding: `0 ${Math.max(0, at.pad - 3)}px` });
  }

  // The lines of a narrow box: words beside the marks or below them, all of them or none.
  narrowLines(node, first, inside) {
    const taken = this.isStacked(node, inside);
    const most = Math.min(NARROW_LINES + taken, this.laid.lines);
    const beside = whole(node.brief, (n) => (n ? inside : first), most, this.width);
    if ((beside && !taken) || first === inside) return (beside ?? []).map((text) => ({ text }));
    const below = whole(node.brief, () => inside, most - 1 - taken, this.width);
    return below ? [...Array(1 + taken).fill({ text: "" }), ...below.map((text) => ({ text }))] : [];
  }

  // The lines of a box: what was done, and what came of it if there is room for that.
  lines(node, first, inside) {
    const most = this.laid.lines;
    // Not a line of marks alone, where a shorter text stands beside them.
    const begins = this.width(node.text.split(" ")[0]) <= first;
    const text = this.width(node.text) <= first || (begins && most > 2) ? node.text : node.brief;
    const own = wrap(text, (n) => (n ? inside : first), most, this.width);
    return [...own.map((line) => ({ text: line })), ...wrap(node.second, () => inside, most - Math.max(1, own.length), this.width).map((line) => ({ text: line, isSecond: true }))];
  }

  listen({ onLeaf, onStep, onUnfold }) {
    const target = (event) => {
      const box = event.target.closest?.("[data-step]");
      const row = event.target.closest?.("[data-leaf]");
      return { box, row, node: box ? this.nodes.find((node) => node.step.id === box.dataset.step) : null };
    };
    const act = (event) => {
      const unfold = event.target.closest("[data-unfold]");
      const { box, row } = target(event);
      if (unfold) onUnfold(unfold.dataset.unfold);
      else if (box) onStep(box.dataset.step);
      else if (row) onLeaf(Number(row.dataset.leaf));
    };
    const tell = (event, at) => {
      const { node, row } = target(event);
      if (node) showTip(at, this.stepTip(node));
      else if (row) showTip(at, this.leafTip(Number(row.dataset.leaf)));
      else hideTip();
    };
    this.element.addEventListener("click", act);
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      act(event);
    });
    this.element.addEventListener("mousemove", (event) => tell(event, event));
    this.element.addEventListener("focusin", (event) => {
      const box = event.target.getBoundingClientRect();
      if (event.target.matches(":focus-visible")) tell(event, { clientX: box.left, clientY: box.bottom - 8 });
    });
    this.element.addEventListener("focusout", hideTip);
    this.element.addEventListener("mouseleave", hideTip);
  }

  // ---- tips

  stepTip(node) {
    const { step } = node;
    const found = [[`step ${step.id}${node.ids.length > 1 ? `, and ${plural(node.ids.length - 1, "step")} with the same tokens: ${node.ids.slice(1, 9).join(", ")}${node.ids.length > 9 ? ", …" : ""}` : ""}`]];
    if (step.cause !== null) found.push([flat(headline(step), 240)]);
    found.push(["written by", author(step)]);
    for (const words of new Set(node.steps.map(causeWords))) if (words !== "the prompt") found.push(["here because it is", words]);
    for (const words of new Set(node.steps.map(refusalWords))) if (words) found.push(["branching", words]);
    found.push(["tokens", ORIGINS.filter((name) => step.origins[name]).map((name) => `${step.origins[name]} ${name}`).join(", ")]);
    const judged = node.below.filter((leaf) => leaf.is_correct !== null);
    if (judged.length) found.push(["right leaves below it", `${judged.filter((leaf) => leaf.is_correct).length} of ${judged.length}`]);
    if (step.entropy_mean !== null) found.push(["entropy in nats: mean, largest", `${num(step.entropy_mean, 4)}, ${num(step.entropy_max, 4)}`]);
    if (step.advantage !== null && step.num_loss) found.push([step.is_hard ? "advantage (shared)" : "advantage, mean of its leaves", score(step.advantage, true)]);
    if (step.ratio_mean !== null && step.is_learned) found.push(["ratio", `${num(step.ratio_min, 5)} to ${num(step.ratio_max, 5)}`]);
    if (step.violation) found.push(["broke the format", plain(step.violation)]);
    return found;
  }

  leafTip(n) {
    const leaf = this.tree.leaves[n];
    const node = this.ends.find((one) => one.leaves.includes(n));
    const equal = node.leaves.length > 1 ? `, and equal to it: ${node.leaves.slice(1).join(", ")}` : "";
    return [[`leaf ${n}${equal}`], ["outcome", `${outcome(leaf).word} (${STATUS_WORDS[leaf.status]})`], ["answer", flat(leaf.answer ?? "none", 80)], ["reward", score(leaf.reward)], ["advantage", score(leaf.advantage, true)], ["tokens", String(leaf.num_tokens)]];
  }

  // ---- colours and choice

  paint(overlay) {
    const scale = { ...this.scale, entropy: this.scale.meanEntropy };
    const mean = (node, of) => {
      const values = node.steps.map(of).filter((value) => value !== null && value !== undefined);
      return values.length ? values.reduce((sum, one) => sum + one, 0) / values.length : null;
    };
    for (const [node, element] of this.boxes) {
      const share = node.below.filter((leaf) => leaf.is_correct).length / Math.max(1, node.below.length);
      const one = { share, origin: node.step.origin, entropy: mean(node, (step) => step.entropy_mean), advantage: mean(node, (step) => step.advantage), ratio: mean(node, (step) => (step.is_learned ? step.ratio_mean : null)), loss: node.steps.some((step) => step.num_loss > 0) };
      element.className = `node ${node.look} fill ${node.depth ? shade(overlay, one, scale) : ""}`;
    }
  }

  select(leaf, step) {
    const end = this.tree.leaves[leaf]?.step_id ?? "";
    for (const [node, element] of this.boxes) {
      const isOn = isBelow({ step_id: end }, node.ids);
      element.classList.toggle("on", isOn);
      element.classList.toggle("sel", node.ids.includes(step));
      const link = this.links.get(node);
      link?.classList.toggle("on", isOn);
      // The chosen path lies on top where edges share a gutter.
      if (link && isOn) link.parentElement.append(link);
    }
    this.rows.forEach((row, n) => row.classList.toggle("on", this.ends[n].leaves.includes(leaf)));
  }

  // The top and the height of the row of a leaf, in pixels.
  rowOf(leaf) {
    const node = this.ends.find((one) => one.leaves.includes(leaf));
    return { top: HEAD + this.laid.row * (node?.row ?? 0), height: this.laid.row };
  }

  // Leaves whose rows begin below the view.
  hidden(bottom) {
    return this.ends.filter((node) => HEAD + this.laid.row * (node.row + 0.6) > bottom).flatMap((node) => node.leaves);
  }
}
