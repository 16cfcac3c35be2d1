// Where everything of a tree stands. Each leaf has a row and each depth a column; a step stands in the row of its first leaf. So a cell
// holds one step at most, and edges run in the gutters between columns: nothing can cover anything else.

// Between a step's box and the next column, where edges bend; inside a box on either side. In narrow columns both are smaller.
const [GAP, PAD] = [18, 8];
const [CLOSE_GAP, CLOSE_PAD] = [8, 2];
const [DOT, LABELLED, CLOSE, WIDEST] = [10, 36, 80, 520]; // columns: without words, the narrowest with words, narrow ones, the widest
const [LEAST_ROW, MOST_LINES, MOST_BROKEN] = [26, 6, 3];
const [LEFT, ROOT] = [6, 19];

// The step before one in time, by its id; `step.parent` is the step whose context it continues.
const before = (step) => step.id.slice(0, Math.max(0, step.id.lastIndexOf(".")));

const leafKey = (leaf) => (leaf ? [leaf.status, leaf.reward, leaf.advantage, leaf.is_correct].join() : "");

// The tree with equal siblings as one node each: {ids, step, depth, children, leaves}. `apart`: nodes, by their first step, that stay unfolded;
// `isFolded` false unfolds all of them. A graft, a branch and an ordinary step are folded apart, so that equal leaves came the same way; leaves only if their
// results are equal too.
export function fold(tree, { isFolded = true, apart = new Set() } = {}) {
  const steps = new Map(tree.steps.map((step) => [step.id, step]));
  const numbers = new Map(tree.leaves.map((leaf, n) => [leaf.step_id, n]));
  const below = new Map();
  for (const step of tree.steps) if (before(step)) below.set(before(step), [...(below.get(before(step)) ?? []), step.id]);
  const key = (id) => [steps.get(id).content_number, ["graft", "branch"].indexOf(steps.get(id).cause?.kind), below.has(id), leafKey(tree.leaves[numbers.get(id)])].join("|");
  const build = (ids) => {
    const groups = new Map();
    for (const child of ids.flatMap((id) => below.get(id) ?? [])) {
      const name = isFolded ? key(child) : child;
      groups.set(name, [...(groups.get(name) ?? []), child]);
    }
    const split = [...groups.values()].flatMap((group) => (apart.has(group[0]) ? group.map((id) => [id]) : [group]));
    const children = split.map(build);
    return { ids, step: steps.get(ids[0]), depth: steps.get(ids[0]).depth, children, leaves: children.length ? [] : ids.map((id) => numbers.get(id)).filter((n) => n !== undefined) };
  };
  return build([tree.steps[0].id]);
}

// All nodes in depth-first order, each with its row; a node stands where its first child stands.
export function rows(root) {
  const nodes = [];
  let next = 0;
  const visit = (node, parent) => {
    node.parent = parent;
    node.row = next;
    nodes.push(node);
    if (!node.children.length) next++;
    else for (const child of node.children) visit(child, node);
  };
  visit(root, null);
  return { nodes, num: next };
}

// The largest width for a column with which all fit: narrow columns keep their own.
function evenly(wanted, room) {
  let left = room;
  let most = 0;
  const sorted = [...wanted].sort((a, b) => a - b);
  for (const [n, width] of sorted.entries()) {
    most = left / (sorted.length - n);
    if (width > most) return most;
    left -= width;
  }
  return Infinity;
}

// Widths that the columns would like to have. The box of a leaf may reach over the columns after its own, which are empty in its row.
function wishes(nodes, depth, widthOf) {
  const wanted = Array.from({ length: depth }, () => LABELLED);
  const whole = (node) => Math.min(WIDEST, widthOf(node) + 2 * PAD) + GAP;
  for (const node of nodes) if (node.depth && node.children.length) wanted[node.depth - 1] = Math.max(wanted[node.depth - 1], whole(node));
  for (let d = depth; d > 0; d--) {
    const after = wanted.slice(d).reduce((sum, one) => sum + one, 0);
    for (const node of nodes) if (node.depth === d && !node.children.length) wanted[d - 1] = Math.max(wanted[d - 1], whole(node) - after);
  }
  return wanted;
}

const deepest = (nodes) => Math.max(0, ...nodes.map((node) => node.depth));

// The width with which every word could be read.
export const wish = (nodes, { side, widthOf }) => LEFT + ROOT + side + wishes(nodes, deepest(nodes), widthOf).reduce((sum, one) => sum + one, 0);

// widthOf: of a node's words and marks. linesOf: how many lines a node has something to say in, in a width. side: width of the leaves' columns at the right; head, line: heights of the head and of a line. narrow: the width below which a box breaks its words. Returns places in pixels.
export function place({ nodes, num }, { room, side, head, line, narrow, widthOf, linesOf }) {
  const depth = deepest(nodes);
  const wanted = wishes(nodes, depth, widthOf);
  const space = Math.max(0, room.width - LEFT - ROOT - side);
  const most = evenly(wanted, space);
  const isDots = most < LABELLED;
  const [gap, pad] = isDots ? [2, 0] : most < CLOSE ? [CLOSE_GAP, CLOSE_PAD] : [GAP, PAD];
  const columns = isDots ? wanted.map(() => Math.max(DOT, Math.min(LABELLED, space / depth))) : wanted.map((width) => Math.min(width, most));
  const starts = [LEFT, LEFT + ROOT];
  for (const column of columns) starts.push(starts.at(-1) + column);
  const width = Math.max(room.width, starts.at(-1) + side);
  const insideOf = (node) => Math.max(0, Math.floor((isDots || node.children.length ? starts[node.depth + 1] : width - side) - gap - starts[node.depth]) - 2 * pad);
  // Rows are as high as their words need, if the room has it.
  const lines = Math.min(MOST_LINES, Math.max(1, ...nodes.map((node) => (node.depth ? linesOf(node, insideOf(node), isDots) : 1))));
  // Narrow boxes break their words into lines, so their rows are high enough for them even if the drawing then scrolls.
  const broken = Math.max(0, ...nodes.map((node) => (node.depth && !isDots && insideOf(node) < narrow ? linesOf(node, insideOf(node), false) : 0)));
  const row = Math.max(LEAST_ROW, line + 9, Math.min(MOST_BROKEN, broken) * line + 11, Math.min(lines * line + 14, (room.height - head - 6) / Math.max(1, num)));
  const at = new Map(nodes.map((node) => {
    const inside = insideOf(node);
    const own = !isDots && widthOf(node) + 2 * PAD < inside ? PAD : pad; // an answer may have room to spare
    const boxed = node.depth === 0 ? 12 : isDots ? Math.floor(columns[node.depth - 1]) - gap : Math.min(inside, widthOf(node)) + 2 * own;
    return [node, { x: starts[node.depth], y: head + row * (node.row + 0.5), inside, pad: own, width: boxed }];
  }));
  return { at, starts, row, lines: Math.max(1, Math.floor((row - 7) / line)), isDots, isClose: most < CLOSE, gap, width, height: head + row * num + 6 };
}

// Through the gutter to a child: straight in its parent's row, else down just before the child's column.
export function edge(from, to, gap) {
  if (from.y === to.y) return `M${from.x + from.width},${from.y}H${to.x}`;
  const turn = to.x - gap / 2;
  const bend = Math.min(6, gap / 2);
  return `M${turn},${from.y}V${to.y - bend}q0,${bend} ${bend},${bend}H${to.x}`;
}
