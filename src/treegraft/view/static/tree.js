// One group: the tree it is on the left, the chosen path on the right, to read or token by token.

import { fileTitle, get, link, note, runPath, to } from "./api.js";
import { h, num, percent, plain, plural, replace, signed } from "./dom.js";
import { Drawing, widths } from "./drawing.js";
import { OVERLAYS, ORIGINS, PLAN, scaleLegend } from "./marks.js";
import { leafFacts, retrievalFactor, stepCard } from "./transcript.js";
import { records, scaleOf, TokenView } from "./tokens.js";

function contrast(title, one) {
  if (!one.with.num || !one.without.num) return one.with.num ? `${title}: all ${one.with.num} leaves` : null;
  return `${title}: reward ${num(one.with.reward)} over ${plural(one.with.num, "leaf", "leaves")} with, ${num(one.without.reward)} over ${one.without.num} without`;
}

// Leaf 3; leaves 3 to 5; or how many, where there are gaps.
function spanWords(numbers) {
  if (numbers.length === 1) return `leaf ${numbers[0]}`;
  return numbers.at(-1) - numbers[0] === numbers.length - 1 ? `leaves ${numbers[0]} to ${numbers.at(-1)}` : `${numbers.length} leaves`;
}

// Leaf 1; leaf 1 and leaf 4; leaf 1 and 5 others.
const leafNames = (numbers) => (numbers.length < 3 ? numbers.map((n) => `leaf ${n}`).join(" and ") : `leaf ${numbers[0]} and ${numbers.length - 1} others`);
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;

function bestWords(tree) {
  if (tree.best === null) return "No leaf has a reward.";
  const leaf = tree.leaves[tree.best];
  const scored = [...tree.leaves.entries()].filter(([, one]) => one.reward !== null);
  const equal = scored.filter(([, one]) => one.reward === leaf.reward);
  if (equal.length === scored.length) return `All ${scored.length} leaves earned ${num(leaf.reward)}: without variance nothing is learned from them.`;
  const ties = equal.filter(([, one]) => one.is_correct === leaf.is_correct && one.num_tokens === leaf.num_tokens).map(([n]) => n);
  const rank = equal.length === 1 ? "the highest" : `${equal.length} leaves earned it, the shortest with ${plural(leaf.num_tokens, "token")}`;
  return `Best: ${leafNames(ties)}, ${leaf.is_correct ? "✓ correct, " : ""}reward ${num(leaf.reward)} (${rank}; group mean ${num(mean(scored.map(([, one]) => one.reward)))})`;
}

// The leaf that learning makes less likely by most, with the reason; null without one.
function pushedDown(tree) {
  const numbers = [...tree.leaves.keys()].filter((n) => tree.leaves[n].advantage < 0 && tree.leaves[n].has_loss);
  if (!numbers.length) return null;
  const least = Math.min(...numbers.map((n) => tree.leaves[n].advantage));
  const lowest = numbers.filter((n) => tree.leaves[n].advantage - least < 1e-9);
  const leaf = tree.leaves[lowest[0]];
  const factor = retrievalFactor(leaf);
  const why = factor !== null && factor > 1 ? `, × ${num(factor)} for its retrieval reward ${signed(leaf.retrieval_reward)}` : "";
  return { leaf: lowest[0], words: `Pushed down most: ${leafNames(lowest)}, ${signed(least)}: reward ${num(leaf.reward)}${leaf.outcome_advantage < 0 ? " is below the mean" : ""}${why}` };
}

// One line; the meanings of the marks unfold.
function drawingLegend(tree) {
  const has = (test) => tree.steps.some(test);
  const item = (mark, words, name) => h("div", null, h("b", { class: name ?? null }, mark), " ", words);
  const rules = new Set(tree.steps.flatMap((one) => [one.decision?.seen.rule, one.cause?.rule]).filter(Boolean));
  return h("details", { class: "ringlegend" },
    h("summary", null, ORIGINS.map((name) => h("span", null, h("i", { class: `dot by-${name}` }), name)), h("span", { class: "branchword" }, "├ branch"), h("span", null, "⊘ none opened"), h("span", { class: "graftword" }, "◆ graft"), h("span", { class: "unfold" }, "what the marks mean")),
    item("ring", "who wrote a step's tokens; the larger a node, the more of them"),
    item("0.4 .0", "a step's id, read along its path: .0 below 0.4 is step 0.4.0"),
    has((one) => one.cause?.kind === "branch" || one.decision) && item("├ p .53>.38", "a branch was opened: its probability p exceeded its limit (p follows from the change of entropy; hover for both)", "branchword"),
    has((one) => one.decision) && item("⊘ p .53≤.75", "the explorer looked here and opened none"),
    has((one) => one.decision) && item("⊘ budget", "p exceeded it, but the group's budget of leaves was spent"),
    rules.has("bernoulli") && item("coin", "p is compared with a number drawn uniformly from 0 to 1, anew each time (rule “bernoulli”)"),
    [...rules].some((one) => one !== "bernoulli") && item("limit", `p is compared with a fixed threshold (rule “${plain([...rules].find((one) => one !== "bernoulli"))}”)`),
    has((one) => one.cause?.kind === "graft") && item("◆ expert sim 1", "a step retrieved from that source's traces, and how similar its history is (1: the same)", "graftword"),
    item("✓ 1", "right (✗ wrong, · not judged), with the reward; ★ the best"),
    item("bar", "a leaf's advantage: to the right it is made likelier, to the left less likely"));
}

export async function treePage(page, { run, query, go }, file, n) {
  const tree = await get(runPath(run, `/trees/${encodeURIComponent(file)}/${n}`));
  const scale = scaleOf(tree);
  const steps = new Map(tree.steps.map((step) => [step.id, step]));
  let leaf = Math.min(tree.leaves.length - 1, Math.max(0, Number(query.leaf ?? tree.best ?? 0)));
  let step = steps.has(query.step) ? query.step : null;
  if (step && query.leaf === undefined) leaf = Math.max(0, leafBelow(step));
  let overlay = OVERLAYS.some((one) => one.id === query.over) ? query.over : "none";
  let mode = query.mode === "tokens" ? "tokens" : "read";
  let view = null;
  const cache = new Map();

  function leafBelow(id) {
    const below = (one) => one.step_id === id || one.step_id.startsWith(`${id}.`);
    if (tree.leaves[leaf] && below(tree.leaves[leaf])) return leaf;
    return tree.leaves.findIndex(below);
  }
  const path = () => {
    const parts = tree.leaves[leaf].step_id.split(".");
    return parts.map((_, end) => steps.get(parts.slice(0, end + 1).join(".")));
  };
  const tokens = (which) => {
    if (!cache.has(which)) cache.set(which, get(runPath(run, `/tokens/${encodeURIComponent(file)}/${n}`), { leaf: which }));
    return cache.get(which);
  };

  // ---- the frame
  const overlayButtons = OVERLAYS.map((one) => h("button", { "data-overlay": one.id, title: `key ${one.key}: ${PLAN[one.id]}`, onclick: () => setOverlay(one.id) }, h("kbd", null, one.key), " ", one.label));
  const legend = h("span", { class: "scale" });
  const scroller = h("div", { class: "scroller", onscroll: () => hint() });
  const more = h("div", { class: "more" });
  const left = h("div", { class: "pane drawingpane" }, drawingLegend(tree), scroller, more);
  const right = h("div", { class: "pane pathpane", tabindex: -1 });
  const neighbour = (by) => { const next = n + by; if (next >= 0 && next < tree.num_trees) go(to.tree(run, file, next, { over: overlay === "none" ? "" : overlay, mode: mode === "read" ? "" : mode })); };
  const down = pushedDown(tree);
  const panes = h("div", { class: "panes" }, left, right);
  page.className = "fixed";
  replace(page,
    h("div", { class: "title" },
      h("h1", null, `${fileTitle(file)}, group ${n}`), h("button", { disabled: n === 0, onclick: () => neighbour(-1), title: "key p" }, "‹ before"), h("button", { disabled: n + 1 >= tree.num_trees, onclick: () => neighbour(1), title: "key n" }, "next ›"),
      h("a", { href: to.task(run, tree.task.id) }, "this task across updates"),
      tree.task.category && h("span", { class: "dim" }, plain(tree.task.category))),
    h("p", { class: "question foreign" }, h("b", null, "Question "), plain(tree.task.question), tree.task.reference.length > 0 && [h("b", null, "  Expected "), tree.task.reference.map((one) => plain(one)).join(" or ")]),
    h("p", { class: "findings" },
      tree.best === null ? h("span", null, bestWords(tree)) : h("button", { onclick: () => choose(tree.best, null) }, bestWords(tree)),
      contrast("Grafts", tree.grafted) && h("span", null, contrast("Grafts", tree.grafted)),
      down && h("button", { onclick: () => choose(down.leaf, null) }, down.words),
      contrast("Branches", tree.branched) && h("span", null, contrast("Branches", tree.branched))),
    h("div", { class: "tools" }, h("span", { class: "dim" }, "colour by"), overlayButtons, legend),
    panes);

  // ---- the drawing
  let drawing = null;
  function draw() {
    // The drawing gets its usual width, between a half and 62 % of the window.
    const all = panes.clientWidth;
    const wanted = widths(tree).usual * (all > 1900 ? 1.4 : 1) + 30;
    panes.style.gridTemplateColumns = `${Math.round(Math.max(0.5 * all, Math.min(0.62 * all, wanted)))}px minmax(0, 1fr)`;
    drawing = new Drawing(tree, { room: { width: scroller.clientWidth, height: scroller.clientHeight }, scale, onLeaf: (one) => choose(one, null), onStep: pickStep });
    replace(scroller, drawing.element);
    drawing.paint(overlay);
    drawing.select(leaf, step);
    hint();
  }

  // What of the drawing is out of sight, as ways there.
  function hint() {
    const { below, right: beyond } = drawing.hidden({ right: scroller.scrollLeft + scroller.clientWidth, bottom: scroller.scrollTop + scroller.clientHeight });
    replace(more,
      beyond.length > 0 && h("button", { onclick: () => scroller.scrollBy(scroller.clientWidth, 0) }, `${spanWords(beyond)} further right ▸`),
      below.length > 0 && h("button", { onclick: () => scroller.scrollBy(0, 0.8 * scroller.clientHeight) }, `${spanWords(below)} below ▾`));
  }

  function reveal() {
    const at = drawing.place(step ?? tree.leaves[leaf].step_id);
    if (at.y < scroller.scrollTop + 40 || at.y > scroller.scrollTop + scroller.clientHeight - 40) scroller.scrollTop = at.y - scroller.clientHeight / 2;
    const end = at.x + (step === null ? drawing.laid.chip * drawing.laid.scale : 120);
    if (end > scroller.scrollLeft + scroller.clientWidth || at.x < scroller.scrollLeft) scroller.scrollLeft = end - scroller.clientWidth;
  }

  // ---- the path
  async function drawPath() {
    const which = leaf;
    const one = tree.leaves[leaf];
    const isBest = leaf === tree.best;
    const head = h("div", { class: "pathhead" },
      h("h2", null, `Leaf ${leaf} (0 to ${tree.leaves.length - 1})`, isBest && h("span", { class: "best" }, " ★ best")),
      h("button", { onclick: () => move(-1), title: "key k" }, "‹"), h("button", { onclick: () => move(1), title: "key j" }, "›"),
      !isBest && tree.best !== null && h("button", { onclick: () => choose(tree.best, null), title: "key b" }, "best"),
      tree.leaves.length > 1 && h("a", { class: "button", href: to.versus(run, file, n, { a: leaf, b: isBest ? other() : tree.best ?? 0 }), title: "key c" }, "side by side"),
      h("button", { class: "mode", "aria-pressed": String(mode === "tokens"), onclick: toggleMode, title: "key t" }, mode === "tokens" ? "to read" : "tokens"));
    const facts = leafFacts(one, tree);
    if (mode === "read") {
      view = null;
      const raw = async (details) => {
        const got = await tokens(which);
        const id = details.closest("[data-step]").dataset.step;
        const found = got.steps.find((s) => s.id === id);
        details.querySelector("pre").textContent = plain((found.texts ?? found.token_ids.map((t) => `#${t} `)).join(""));
      };
      replace(right, head, facts, path().map((s) => stepCard(s, { run, tree, leaf: one, onPick: pickStep, selected: s.id === step, raw })));
    } else {
      const got = await tokens(which);
      if (which !== leaf || mode !== "tokens") return;
      view = new TokenView(records(got.steps), { scale, overlay, head: (id) => h("p", { class: "tokhead" }, h("button", { class: "stepid", onclick: () => pickStep(id) }, id === "0" ? "prompt" : id), ` ${steps.get(id).cause?.kind ?? ""}`) });
      replace(right, head, facts, !tree.has_texts && h("p", { class: "notice" }, "This folder holds no checkpoint with a tokenizer, so tokens are shown as ids."),
        overlay === "ratio" && !got.steps.some((s) => s.ratios) && h("p", { class: "notice" }, "No ratio was recorded on this path: it was not learned from (no variance in its group, or an evaluation)."), view.element);
    }
    right.dataset.leaf = String(leaf);
    right.dataset.mode = mode;
  }
  // Scrolls the pane and never the page, whose head must stay in sight.
  function showStep() {
    const card = step === null ? null : right.querySelector(`[data-step="${CSS.escape(step)}"]`);
    right.scrollTop = card ? card.getBoundingClientRect().top - right.getBoundingClientRect().top + right.scrollTop - 8 : 0;
  }
  const other = () => tree.leaves.findIndex((one, k) => k !== leaf && one.reward !== tree.leaves[leaf].reward) >= 0 ? tree.leaves.findIndex((one, k) => k !== leaf && one.reward !== tree.leaves[leaf].reward) : leaf === 0 ? 1 : 0;

  // ---- actions
  async function choose(which, which_step) {
    leaf = which;
    step = which_step;
    note({ leaf, step: step ?? "" });
    drawing.select(leaf, step);
    reveal();
    await drawPath();
    showStep();
  }
  const pickStep = (id) => choose(Math.max(0, leafBelow(id)), id);
  const move = (by) => choose((leaf + by + tree.leaves.length) % tree.leaves.length, null);
  const walk = (by) => {
    const ids = path().map((s) => s.id);
    const at = step === null ? (by > 0 ? 0 : ids.length) : ids.indexOf(step);
    return choose(leaf, ids[Math.min(ids.length - 1, Math.max(0, at + by))]);
  };
  function setOverlay(id) {
    overlay = id;
    note({ over: overlay === "none" ? "" : overlay });
    overlayButtons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.overlay === overlay)));
    replace(legend, scaleLegend(overlay, scale), h("span", { class: "dim" }, PLAN[overlay]));
    drawing?.paint(overlay);
    if (view && overlay !== "ratio") view.paint(overlay);
    else if (view) drawPath();
  }
  async function toggleMode() {
    mode = mode === "tokens" ? "read" : "tokens";
    note({ mode: mode === "read" ? "" : mode });
    await drawPath();
  }
  const unfold = () => {
    const all = [...right.querySelectorAll("details.raw")];
    const open = !all.every((one) => one.open);
    all.forEach((one) => (one.open = open));
  };

  setOverlay(overlay);
  draw();
  await drawPath();
  reveal();
  showStep();
  // The room changes with the window, the lines above the panes and the unfolded legend.
  const room = () => `${left.clientWidth} ${left.clientHeight} ${left.querySelector(".ringlegend").open}`;
  let drawnFor = room();
  const redraw = () => {
    if (room() === drawnFor) return;
    drawnFor = room();
    draw();
  };
  const watch = new ResizeObserver(redraw);
  watch.observe(left);
  watch.observe(panes);
  left.querySelector(".ringlegend").addEventListener("toggle", redraw);
  return {
    title: `${fileTitle(file)}, group ${n}`,
    close: () => watch.disconnect(),
    keys: [
      ["j ArrowDown", "next leaf", () => move(1)],
      ["k ArrowUp", "leaf before", () => move(-1)],
      ["l ArrowRight", "next step of the path", () => walk(1)],
      ["h ArrowLeft", "step before", () => walk(-1)],
      ["b", "the best leaf", () => tree.best !== null && choose(tree.best, null)],
      ["t", "tokens or text", toggleMode],
      ["m", "unfold the markup", unfold],
      ["o", "next overlay", () => setOverlay(OVERLAYS[(OVERLAYS.findIndex((one) => one.id === overlay) + 1) % OVERLAYS.length].id)],
      ["0 1 2 3 4 5", "overlay: none, origin, entropy, advantage, log ratio, loss", (key) => setOverlay(OVERLAYS[Number(key)].id)],
      ["c", "side by side with the best", () => go(to.versus(run, file, n, { a: leaf, b: leaf === tree.best ? other() : tree.best ?? 0 }))],
      ["n", "next group", () => neighbour(1)],
      ["p", "group before", () => neighbour(-1)],
    ],
  };
}
