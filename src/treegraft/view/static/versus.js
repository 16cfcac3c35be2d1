// Two leaves of a group side by side: common steps folded, the first difference marked.

import { fileTitle, get, note, runPath, to } from "./api.js";
import { h, plain, plural, replace, score } from "./dom.js";
import { headline, leafChip, outcome, OVERLAYS, scaleLegend } from "./marks.js";
import { leafFacts, stepCard } from "./transcript.js";
import { records, scaleOf, TokenView } from "./tokens.js";

const same = (a, b) => a.token_ids.length === b.token_ids.length && a.token_ids.every((token, n) => token === b.token_ids[n]);

// How many steps and tokens two paths have in common, and whether they are the very same steps.
export function parting(one, two) {
  let steps = 0;
  let shared = 0;
  while (steps < one.length && steps < two.length && same(one[steps], two[steps])) {
    if (one[steps].id === two[steps].id) shared++;
    steps++;
  }
  const count = (path) => path.slice(0, steps).reduce((sum, step) => sum + step.token_ids.length, 0);
  const [a, b] = [one[steps]?.token_ids ?? [], two[steps]?.token_ids ?? []];
  let within = 0;
  while (within < a.length && within < b.length && a[within] === b[within]) within++;
  return { steps, shared, tokens: count(one) + within, within };
}

function verdict(a, b, left, right, cut, steps) {
  const first = (path) => (path[cut.steps] ? `“${headline(steps.get(path[cut.steps].id)).slice(0, 60)}”` : "nothing more");
  const difference = a.reward !== null && b.reward !== null ? `The left one earned ${score(a.reward)}, the right one ${score(b.reward)}` : "One of them has no reward";
  const twins = cut.steps - cut.shared;
  return `${difference} (advantage ${score(a.advantage, true)} against ${score(b.advantage, true)}). They part after ${plural(cut.tokens, "token")}: left goes on with ${first(left)}, right with ${first(right)}.${twins > 0 ? ` ${plural(twins, "step was", "steps were")} written twice with the same tokens.` : ""}`;
}

export async function versus(page, { run, query, go }, file, n) {
  const tree = await get(runPath(run, `/trees/${encodeURIComponent(file)}/${n}`));
  const steps = new Map(tree.steps.map((step) => [step.id, step]));
  const scale = scaleOf(tree);
  const inside = (value, fallback) => Math.min(tree.leaves.length - 1, Math.max(0, Math.trunc(Number(value ?? fallback)) || 0));
  let pair = [inside(query.a, 0), inside(query.b, 1)];
  let mode = query.mode === "tokens" ? "tokens" : "read";
  let overlay = OVERLAYS.some((one) => one.id === query.over) ? query.over : "origin";
  let views = [];
  const place = h("div", { class: "versus" });
  const said = h("p", { class: "findings" });
  const legend = h("span", { class: "scale" });
  const chooser = (side) => {
    const made = h("select", { id: side ? "leaf-b" : "leaf-a", "aria-label": side ? "right leaf" : "left leaf", onchange: (event) => { pair[side] = Number(event.target.value); draw(); } },
      tree.leaves.map((leaf, k) => h("option", { value: k }, `leaf ${k}: ${outcome(leaf).glyph} ${outcome(leaf).word}, reward ${score(leaf.reward)}${leaf.num_grafts ? ", graft" : ""}${leaf.num_branches ? ", branch" : ""}`)));
    return made;
  };
  const choosers = [chooser(0), chooser(1)];
  replace(page,
    h("div", { class: "title" }, h("h1", null, `${fileTitle(file)}, group ${n}, side by side`), h("a", { href: to.tree(run, file, n, { leaf: pair[0] }) }, "the tree")),
    h("p", { class: "question foreign" }, h("b", null, "Question "), plain(tree.task.question)), said,
    h("div", { class: "tools" }, choosers[0], h("button", { onclick: () => swap(), title: "key x" }, "⇄"), choosers[1], h("button", { onclick: () => toggle(), title: "key t" }, "tokens or text"), legend), place);

  async function draw() {
    const now = [...pair];
    choosers.forEach((one, side) => (one.value = pair[side]));
    note({ a: pair[0], b: pair[1], mode: mode === "read" ? "" : mode, over: overlay === "origin" ? "" : overlay });
    const got = await Promise.all(now.map((leaf) => get(runPath(run, `/tokens/${encodeURIComponent(file)}/${n}`), { leaf })));
    if (now.join() !== pair.join()) return;
    const paths = got.map((one) => one.steps);
    const leaves = now.map((leaf) => tree.leaves[leaf]);
    const cut = parting(paths[0], paths[1]);
    said.textContent = now[0] === now[1] ? "Both sides show the same leaf." : verdict(leaves[0], leaves[1], paths[0], paths[1], cut, steps);
    const common = h("details", { class: "common" }, h("summary", null, `common: ${plural(cut.steps, "step")}, ${plural(paths[0].slice(0, cut.steps).reduce((sum, step) => sum + step.token_ids.length, 0), "token")}`), paths[0].slice(0, cut.steps).map((step) => stepCard(steps.get(step.id), { run, tree, leaf: leaves[0] })));
    views = [];
    const side = (k) => {
      const rest = paths[k].slice(cut.steps);
      const head = h("div", { class: "pathhead" }, h("h2", null, `Leaf ${now[k]}`), leafChip(leaves[k]), h("span", { class: "dim" }, `reward ${score(leaves[k].reward)}`));
      let body;
      if (mode === "tokens") {
        const view = new TokenView(records(rest, leaves[k].is_correct), { scale, overlay, differs: cut.within, head: (id) => h("p", { class: "tokhead" }, `${id} ${steps.get(id).cause?.kind ?? ""}`) });
        views.push(view);
        body = view.element;
      } else body = rest.map((step, place) => {
        const card = stepCard(steps.get(step.id), { run, tree, leaf: leaves[k] });
        if (place === 0) card.classList.add("parts");
        return card;
      });
      return h("section", { class: "side", "data-side": k }, head, leafFacts(leaves[k], tree), rest.length ? body : h("p", { class: "dim" }, "ends here"));
    };
    replace(legend, mode === "tokens" ? scaleLegend(overlay, scale) : []);
    replace(place, common, h("div", { class: "divergence" }, now[0] === now[1] ? "no divergence" : "▼ they part here ▼"), h("div", { class: "sides" }, side(0), side(1)));
    place.dataset.ready = now.join();
  }
  const swap = () => { pair = [pair[1], pair[0]]; return draw(); };
  const toggle = () => { mode = mode === "tokens" ? "read" : "tokens"; return draw(); };
  const step = (by) => { pair[1] = (pair[1] + by + tree.leaves.length) % tree.leaves.length; return draw(); };
  const paint = (by) => {
    if (mode === "tokens") overlay = OVERLAYS[(OVERLAYS.findIndex((one) => one.id === overlay) + by + OVERLAYS.length) % OVERLAYS.length].id;
    mode = "tokens";
    return draw();
  };
  await draw();
  return {
    title: "side by side",
    keys: [
      ["j ArrowDown", "next leaf on the right", () => step(1)],
      ["k ArrowUp", "leaf before on the right", () => step(-1)],
      ["x", "swap sides", swap],
      ["t", "tokens or text", toggle],
      ["e", "unfold common steps", () => { const d = place.querySelector("details.common"); d.open = !d.open; }],
      ["o", "tokens coloured by the next", () => paint(1)],
      ["O", "tokens coloured by the one before", () => paint(-1)],
    ],
  };
}
