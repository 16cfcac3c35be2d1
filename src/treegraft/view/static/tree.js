// One group: the tree it is on the left, the chosen path on the right, to read or token by token.

import { fileTitle, get, link, note, runPath, to } from "./api.js";
import { h, num, percent, plain, plural, replace, signed } from "./dom.js";
import { Drawing } from "./drawing.js";
import { OVERLAYS, ORIGINS, PLAN, scaleLegend } from "./marks.js";
import { leafFacts, stepCard } from "./transcript.js";
import { records, scaleOf, TokenView } from "./tokens.js";

function contrast(title, one) {
  if (!one.with.num || !one.without.num) return one.with.num ? `${title}: all ${one.with.num} leaves` : null;
  return `${title}: reward ${num(one.with.reward)} over ${one.with.num} leaves with, ${num(one.without.reward)} over ${one.without.num} without`;
}

function bestWords(tree) {
  if (tree.best === null) return "No leaf has a reward.";
  const leaf = tree.leaves[tree.best];
  const others = tree.leaves.filter((one) => one.reward !== null);
  const equal = others.filter((one) => one.reward === leaf.reward).length;
  if (equal === others.length) return `All ${others.length} leaves earned ${num(leaf.reward)}: without variance nothing is learned from them.`;
  const why = `${leaf.is_correct ? "its answer is correct, " : ""}reward ${num(leaf.reward)}${equal > 1 ? `, as ${plural(equal - 1, "other")}; it is the shortest of them` : ", the highest"}`;
  return `Best: leaf ${tree.best} — ${why} (group mean ${num(others.reduce((sum, one) => sum + one.reward, 0) / others.length)}).`;
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
  const left = h("div", { class: "pane drawingpane" });
  const right = h("div", { class: "pane pathpane", tabindex: -1 });
  const neighbour = (by) => { const next = n + by; if (next >= 0 && next < tree.num_trees) go(to.tree(run, file, next, { over: overlay === "none" ? "" : overlay, mode: mode === "read" ? "" : mode })); };
  page.className = "fixed";
  replace(page,
    h("div", { class: "title" },
      h("h1", null, `${fileTitle(file)}, group ${n}`), h("button", { disabled: n === 0, onclick: () => neighbour(-1), title: "key p" }, "‹ before"), h("button", { disabled: n + 1 >= tree.num_trees, onclick: () => neighbour(1), title: "key n" }, "next ›"),
      h("a", { href: to.task(run, tree.task.id) }, "this task across updates"),
      tree.task.category && h("span", { class: "dim" }, plain(tree.task.category))),
    h("p", { class: "question foreign" }, h("b", null, "Question "), plain(tree.task.question), tree.task.reference.length > 0 && [h("b", null, "  Expected "), tree.task.reference.map((one) => plain(one)).join(" or ")]),
    h("p", { class: "findings" }, [bestWords(tree), contrast("Grafts", tree.grafted), contrast("Branches", tree.branched)].filter(Boolean).map((text) => h("span", null, text))),
    h("div", { class: "tools" }, h("span", { class: "dim" }, "colour by"), overlayButtons, legend),
    h("div", { class: "panes" }, left, right));

  // ---- the drawing
  let drawing = null;
  function draw() {
    drawing = new Drawing(tree, { width: left.clientWidth - 16, scale, onLeaf: (one) => choose(one, null), onStep: pickStep });
    const ringLegend = h("div", { class: "ringlegend" }, h("span", null, "ring: who wrote its tokens "), ORIGINS.map((name) => h("span", null, h("i", { class: `dot by-${name}` }), name)), h("span", { class: "branchword" }, "├ branch (ΔH: entropy change, p: probability)"), h("span", { class: "refusedword" }, "⊘ looked, none opened"), h("span", { class: "graftword" }, "◆ graft (source, similarity)"), h("span", null, "✓ right or ✗ wrong, with the reward"), h("span", null, "bar: advantage (orange up, blue down)"));
    replace(left, ringLegend, drawing.element);
    drawing.paint(overlay);
    drawing.select(leaf, step);
  }

  function reveal() {
    const at = drawing.place(step ?? tree.leaves[leaf].step_id);
    if (at.y < left.scrollTop + 60 || at.y > left.scrollTop + left.clientHeight - 60) left.scrollTop = at.y - left.clientHeight / 2;
  }

  // ---- the path
  async function drawPath() {
    const which = leaf;
    const one = tree.leaves[leaf];
    const isBest = leaf === tree.best;
    const head = h("div", { class: "pathhead" },
      h("h2", null, `Leaf ${leaf} of ${tree.leaves.length}`, isBest && h("span", { class: "best" }, " ★ best")),
      h("button", { onclick: () => move(-1), title: "key k" }, "‹"), h("button", { onclick: () => move(1), title: "key j" }, "›"),
      !isBest && tree.best !== null && h("button", { onclick: () => choose(tree.best, null), title: "key b" }, "best"),
      tree.leaves.length > 1 && h("a", { class: "button", href: to.versus(run, file, n, { a: leaf, b: isBest ? other() : tree.best ?? 0 }), title: "key c" }, "side by side"),
      h("button", { class: "mode", "aria-pressed": String(mode === "tokens"), onclick: toggleMode, title: "key t" }, mode === "tokens" ? "to read" : "tokens"));
    const facts = leafFacts(one, tree.task);
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

  // ---- what can be done
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

  draw();
  setOverlay(overlay);
  await drawPath();
  reveal();
  showStep();
  const onResize = () => draw();
  addEventListener("resize", onResize);
  return {
    title: `${fileTitle(file)}, group ${n}`,
    close: () => removeEventListener("resize", onResize),
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
