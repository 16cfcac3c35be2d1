// Case studies: what several evaluations did with the same questions, side by side. A page of its own, with its data in it.

import { add, flat, h, percent, plain, plural } from "./dom.js";
import { leafChip } from "./marks.js";
import { leafFacts, stepCard } from "./transcript.js";

const held = JSON.parse(document.getElementById("data").textContent);
const light = matchMedia("(prefers-color-scheme: light)");
const setTheme = (name) => (document.documentElement.dataset.theme = name);
const followTheme = () => setTheme(light.matches ? "light" : "dark");

const evaluation = (side) => `${side.label.startsWith(side.run) ? "" : `${side.run}, `}${side.kind} evaluation after update ${side.update}`;

function counts() {
  const all = held.kinds.reduce((sum, one) => sum + one.num, 0);
  const row = (one) => h("tr", null, h("th", null, plain(one.words)), h("td", null, one.num), h("td", null, percent(one.num / all)));
  return [
    h("table", { class: "counts" }, h("thead", null, h("tr", null, ["who was right", "questions", "share"].map((name) => h("th", null, name)))), h("tbody", null, held.kinds.map(row))),
    h("p", null, `They differ on ${plural(held.num_different, "question")} of ${all}; ${held.cases.length} of these ${held.cases.length === 1 ? "is" : "are"} shown. Each kind of difference takes its turn, in the order of the held-out set.`),
    held.notes.map((note) => h("p", { class: "dim" }, plain(note))),
  ];
}

function sideOf(shown, side, task) {
  const leaf = shown.leaves[shown.leaf];
  const tree = { task, leaves: shown.leaves, peers: shown.peers };
  const several = shown.num_judged > 1 && h("p", { class: "dim" }, `${shown.num_right} of ${shown.num_judged} trajectories right; shown is the first that came out as most did.`);
  return h("section", { class: "side" },
    h("div", { class: "pathhead" }, h("h3", null, plain(side.label)), leafChip(leaf)),
    several, leafFacts(leaf, tree), shown.steps.map((step) => stepCard(step, { tree, leaf })));
}

function caseOf(one, number) {
  const expected = one.task.reference.map((answer) => plain(answer)).join(" or ");
  return h("section", { class: "case", id: `case-${number + 1}` },
    h("h2", null, `${number + 1}. ${plain(one.words)}`),
    h("p", { class: "question foreign" }, plain(one.task.question)),
    h("p", { class: "dim" }, expected && h("span", { class: "foreign" }, `expected ${expected} · `), h("span", { class: "foreign" }, `task ${plain(one.task.id)}`)),
    h("div", { class: `sides${one.sides.length > 2 ? " many" : ""}` }, one.sides.map((shown, n) => sideOf(shown, held.sides[n], one.task))));
}

followTheme();
light.addEventListener("change", followTheme);
addEventListener("beforeprint", () => setTheme("light"));
addEventListener("afterprint", followTheme);
add(document.getElementById("page"), [
  h("h1", null, plain(held.title)),
  h("p", null, h("a", { href: "report.html" }, "report")),
  h("ul", null, held.sides.map((side) => h("li", null, h("b", null, plain(side.label)), `: ${plain(evaluation(side))}`))),
  counts(),
  held.cases.length > 1 && h("ol", { class: "caselist" }, held.cases.map((one, n) => h("li", null, h("a", { href: `#case-${n + 1}`, class: "foreign" }, flat(one.task.question, 90)), ` (${plain(one.words)})`))),
  held.cases.map(caseOf),
]);
