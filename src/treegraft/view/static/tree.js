// One group: the tree it is on the left, the chosen path on the right, to read or token by token.

import { fileTitle, get, note, runPath, to } from "./api.js";
import { h, plain, replace } from "./dom.js";
import { Drawing } from "./drawing.js";
import { fold, rows } from "./layout.js";
import { brief, icon, isDrawn, leafChip, ORIGINS, OVERLAYS, PLAN, scaleLegend } from "./marks.js";
import { bestName, leafNames, summary } from "./summary.js";
import { leafFacts, stepCard } from "./transcript.js";
import { records, scaleOf, TokenView } from "./tokens.js";

// The marks that this tree has, with their meanings.
function drawingLegend(tree) {
  const has = (test) => tree.steps.some(test);
  const item = (mark, words, name) => h("span", { class: `item ${name ?? ""}` }, mark, " ", words);
  const branches = tree.steps.filter((one) => one.cause?.kind === "branch");
  const bare = branches.find((one) => !isDrawn(one));
  // Which steps stand for several, and where such a one forks although nothing was branched or grafted.
  const twins = rows(fold(tree)).nodes.filter((node) => node.ids.length > 1);
  const isFork = (node) => node.children.filter((one) => !["branch", "graft", "retry"].includes(one.step.cause.kind)).length > 1;
  const alike = twins.some((node) => node.depth === 1) ? "rollouts that began alike" : "equal steps";
  const origins = ORIGINS.filter((name) => name !== "prompt" && has((step) => step.origin === name));
  return h("div", { class: "treelegend" },
    origins.map((name) => item(h("i", { class: `stripe by-${name}` }), name === "policy" ? "by the policy" : name)),
    has((one) => one.cause?.kind === "graft") && item(icon("graft"), "graft: a step of another agent", "graft"),
    bare && item(icon("branch"), [h("b", null, `P ${brief(bare.cause.probability).slice(1)}`), " branch, and the rule's probability"], "branch"),
    has(isDrawn) && item(icon("branch"), [h("b", null, "drawn"), " branch: a further child of a finished step, drawn at random"], "branch"),
    has((one) => one.cause?.kind === "retry") && item(icon("branch"), [h("b", null, "forced"), " retry: the opening of a call or an answer is forced, the rest is the policy's"], "branch"),
    twins.some(isFork) && item(icon("fork"), `fork without a mark: ${alike}, then parted`),
    has((one) => one.decision && !one.decision.num_wanted) && item(icon("refused"), "considered, no branch", "refused"),
    has((one) => one.decision && one.decision.num_opened < one.decision.num_wanted) && item(icon("budget"), "no budget left for one", "budget"),
    has((one) => one.content.observations.some((seen) => seen.is_error)) && item(icon("error"), "tool error", "error"),
    has((one) => one.num_loss) && has((one) => one.cause && !one.num_loss) && item(h("i", { class: "hatch" }), "no loss: not learned from"),
    twins.length > 0 && item(h("span", { class: "times" }, "×2"), `${alike}, drawn once (x unfolds)`));
}

export async function treePage(page, { run, query, go }, file, n) {
  const tree = await get(runPath(run, `/trees/${encodeURIComponent(file)}/${n}`));
  const scale = scaleOf(tree);
  const steps = new Map(tree.steps.map((step) => [step.id, step]));
  const isEmpty = tree.leaves.length === 0;
  const usual = tree.leaves.some((one) => one.is_correct !== null) ? "outcome" : "advantage";
  let leaf = Math.min(tree.leaves.length - 1, Math.max(0, Math.trunc(Number(query.leaf ?? tree.best ?? 0)) || 0));
  let step = steps.has(query.step) ? query.step : null;
  if (step && query.leaf === undefined) leaf = Math.max(0, leafBelow(step));
  let overlay = OVERLAYS.some((one) => one.id === query.over) ? query.over : usual;
  let mode = query.mode === "tokens" ? "tokens" : "read";
  const folding = { isFolded: true, apart: new Set() };
  let view = null;
  const cache = new Map();
  const best = bestName(tree);

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
  const overlayButtons = OVERLAYS.map((one) => h("button", { "data-overlay": one.id, title: `${PLAN[one.id]} (key o: the next)`, onclick: () => setOverlay(one.id) }, one.label));
  const overlayChoice = h("select", { "aria-label": "colour by", onchange: (event) => setOverlay(event.target.value) }, OVERLAYS.map((one) => h("option", { value: one.id }, one.label)));
  const legend = h("span", { class: "scale" });
  const scroller = h("div", { class: "scroller", onscroll: () => hint() });
  const more = h("button", { class: "more", hidden: true, onclick: () => scroller.scrollBy(0, Math.max(80, 0.8 * scroller.clientHeight)) });
  const left = h("div", { class: "pane drawingpane" }, scroller, h("div", { class: "treefoot" }, drawingLegend(tree), more));
  const right = h("div", { class: "pane pathpane", tabindex: -1 });
  const neighbour = (by) => { const next = n + by; if (next >= 0 && next < tree.num_trees) go(to.tree(run, file, next, { over: overlay === usual ? "" : overlay, mode: mode === "read" ? "" : mode })); };
  const panes = h("div", { class: "panes" }, left, right);
  const sentence = (one) => (one.leaf === undefined ? h("span", { class: `said ${one.kind}`, title: one.title }, one.words) : h("button", { class: `said ${one.kind}`, title: one.title, onclick: () => choose(one.leaf, null) }, one.kind === "graft" || one.kind === "branch" ? [icon(one.kind), " "] : null, one.words));
  const sentences = summary(tree).map(sentence);
  // Shown on a narrow window alone, where the sentences would push the tree out of sight.
  const unfold = h("button", { class: "unfold", "aria-expanded": "false", onclick: () => { const isOpen = unfold.parentElement.classList.toggle("open"); unfold.setAttribute("aria-expanded", String(isOpen)); unfold.textContent = isOpen ? "less ▴" : `${sentences.length - 1} more ▾`; } }, `${sentences.length - 1} more ▾`);
  page.className = "fixed treepage";
  replace(page,
    h("div", { class: "title" },
      h("h1", null, `${fileTitle(file)}, group ${n}`), h("button", { disabled: n === 0, onclick: () => neighbour(-1), title: "group before (key p)", "aria-label": "group before" }, "‹"), h("button", { disabled: n + 1 >= tree.num_trees, onclick: () => neighbour(1), title: "next group (key n)", "aria-label": "next group" }, "›"),
      tree.task.category && h("span", { class: "dim roomy" }, plain(tree.task.category)),
      h("div", { class: "overlays" }, h("span", { class: "dim" }, "colour by"), overlayChoice, overlayButtons, legend)),
    h("p", { class: "question foreign" }, h("b", null, "Question "), plain(tree.task.question), tree.task.reference.length > 0 && [h("b", null, "  Expected "), tree.task.reference.map((one) => plain(one)).join(" or ")]),
    h("p", { class: "findings" }, sentences[0], sentences.length > 1 && unfold, sentences.slice(1)),
    panes);

  // ---- the drawing
  let drawing = null;
  // The drawing gets the width that its words want, within limits; the path has the rest.
  function room(wish) {
    const all = panes.clientWidth;
    const [least, most] = all > 1700 ? [0.5, 0.64] : [0.54, 0.7];
    panes.style.setProperty("--tree", `${Math.round(Math.max(least * all, Math.min(most * all, wish + 30)))}px`);
    // Where the panes stand one below the other, the drawing's height is its own.
    const isStacked = left.offsetWidth > 0.9 * all;
    return { width: scroller.clientWidth, height: isStacked ? 0.7 * innerHeight : scroller.clientHeight };
  }
  function draw() {
    if (isEmpty) return replace(scroller, h("p", { class: "notice" }, "This tree has no leaf: its rollouts were lost before they had a step."));
    const kept = scroller.scrollTop;
    drawing = new Drawing(tree, { room, scale, folding, onLeaf: (one) => choose(one, null), onStep: pickStep, onUnfold: unfoldNode });
    replace(scroller, drawing.element);
    drawing.paint(overlay);
    drawing.select(leaf, step);
    scroller.scrollTop = kept;
    hint();
  }

  // The leaves that are out of sight, as a way there.
  function hint() {
    const below = drawing?.hidden(scroller.scrollTop + scroller.clientHeight) ?? [];
    more.hidden = below.length === 0;
    const right = below.filter((one) => tree.leaves[one].is_correct).length;
    more.textContent = `${leafNames(below)} below${right ? `, ${below.length === 1 ? "" : `${right} `}right` : ""} ▾`;
  }

  function reveal() {
    const { top, height } = drawing.rowOf(leaf);
    if (top < scroller.scrollTop + height || top + height > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top - scroller.clientHeight / 2;
  }

  // ---- the path
  async function drawPath() {
    if (isEmpty) return replace(right);
    const which = leaf;
    const one = tree.leaves[leaf];
    const isBest = leaf === tree.best;
    const head = h("div", { class: "pathhead" },
      h("h2", null, `Leaf ${leaf}`, h("small", null, ` of 0 to ${tree.leaves.length - 1}`)), leafChip(one), isBest && best && h("span", { class: `best ${one.is_correct ? "right" : ""}` }, one.is_correct ? "★ best" : best),
      h("span", { class: "spring" }), h("button", { onclick: () => move(-1), title: "leaf before (key k)", "aria-label": "leaf before" }, "‹"), h("button", { onclick: () => move(1), title: "next leaf (key j)", "aria-label": "next leaf" }, "›"),
      h("span", { class: "buttons" },
        !isBest && best && h("button", { onclick: () => choose(tree.best, null), title: "key b" }, best),
        h("button", { class: "mode", "aria-pressed": String(mode === "tokens"), onclick: toggleMode, title: "key t" }, "tokens")));
    const facts = leafFacts(one, tree);
    if (mode === "read") {
      view = null;
      const raw = async (details) => {
        const got = await tokens(which);
        const id = details.closest("[data-step]").dataset.step;
        const found = got.steps.find((s) => s.id === id);
        details.querySelector("pre").textContent = plain((found.texts ?? found.token_ids.map((t) => `#${t} `)).join(""));
      };
      replace(right, head, facts, path().map((s) => stepCard(s, { tree, leaf: one, onPick: pickStep, selected: s.id === step, raw })));
    } else {
      const got = await tokens(which);
      if (which !== leaf || mode !== "tokens") return;
      view = new TokenView(records(got.steps, one.is_correct), { scale, overlay, head: (id) => h("p", { class: "tokhead" }, h("button", { class: "stepid", onclick: () => pickStep(id) }, id === "0" ? "prompt" : id), ` ${steps.get(id).cause?.kind ?? ""}`) });
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

  // ---- actions
  async function choose(which, which_step) {
    if (isEmpty) return;
    leaf = which;
    step = which_step;
    note({ leaf, step: step ?? "" });
    drawing.select(leaf, step);
    reveal();
    await drawPath();
    showStep();
  }
  const pickStep = (id) => choose(Math.max(0, leafBelow(id)), id);
  // In the order of the drawing's rows, which folding may change.
  const move = (by) => { const order = drawing.ends.flatMap((node) => node.leaves); return choose(order[(order.indexOf(leaf) + by + order.length) % order.length], null); };
  const walk = (by) => {
    const ids = path().map((s) => s.id);
    const at = step === null ? (by > 0 ? 0 : ids.length) : ids.indexOf(step);
    return choose(leaf, ids[Math.min(ids.length - 1, Math.max(0, at + by))]);
  };
  function unfoldNode(id) {
    folding.apart.add(id);
    draw();
  }
  function unfoldAll() {
    folding.isFolded = !folding.isFolded;
    folding.apart.clear();
    draw();
    reveal();
  }
  function setOverlay(id) {
    overlay = id;
    note({ over: overlay === usual ? "" : overlay });
    overlayButtons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.overlay === overlay)));
    overlayChoice.value = overlay;
    replace(legend, scaleLegend(overlay, scale));
    legend.title = PLAN[overlay];
    drawing?.paint(overlay);
    drawing?.select(leaf, step);
    if (view && overlay !== "ratio") view.paint(overlay);
    else if (view) drawPath();
  }
  const nextOverlay = () => setOverlay(OVERLAYS[(OVERLAYS.findIndex((one) => one.id === overlay) + 1) % OVERLAYS.length].id);
  async function toggleMode() {
    mode = mode === "tokens" ? "read" : "tokens";
    note({ mode: mode === "read" ? "" : mode });
    await drawPath();
  }

  setOverlay(overlay);
  draw();
  await drawPath();
  if (!isEmpty) {
    reveal();
    showStep();
  }
  // The room changes with the window and with the lines above the panes.
  const size = () => `${panes.clientWidth} ${scroller.clientWidth} ${scroller.clientHeight}`;
  let drawnFor = size();
  const watch = new ResizeObserver(() => {
    if (size() === drawnFor) return;
    draw();
    drawnFor = size();
  });
  watch.observe(left);
  watch.observe(panes);
  const keys = isEmpty ? [] : [
    ["j ArrowDown", "next leaf", () => move(1)],
    ["k ArrowUp", "leaf before", () => move(-1)],
    ["l ArrowRight", "next step of the path", () => walk(1)],
    ["h ArrowLeft", "step before", () => walk(-1)],
    ["b", "the leaf with the highest reward", () => tree.best !== null && choose(tree.best, null)],
    ["x", "unfold or fold equal steps", unfoldAll],
    ["t", "tokens or text", toggleMode],
    ["o", "colour by the next", nextOverlay],
  ];
  return {
    title: `${fileTitle(file)}, group ${n}`,
    close: () => watch.disconnect(),
    keys: [...keys, ["n", "next group", () => neighbour(1)], ["p", "group before", () => neighbour(-1)]],
  };
}
