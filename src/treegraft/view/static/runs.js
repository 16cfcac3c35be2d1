// The list of runs: which folder, how far, how good, at what cost; and which of them are compared.

import { note, to } from "./api.js";
import { duration, short } from "./charts.js";
import { chosenRuns, colourOf, joined } from "./chosen.js";
import { h, percent, plain, plural, replace } from "./dom.js";
import { makeList } from "./table.js";

const STATES = { running: 0, stopped: 1, finished: 2, damaged: 3 };
const stateOf = (run) => (run.error ? "damaged" : run.is_live ? "running" : run.is_over ? "finished" : "stopped");
const ago = (newest) => (newest ? `${duration(Math.max(0, Date.now() / 1000 - newest / 1e9), undefined, 2)} ago` : "");

// Of a path its end tells runs apart.
const ending = (path) => { const parts = path.split("/"); return parts.length > 4 ? `…/${parts.slice(-3).join("/")}` : path; };

export async function runsPage(page, { runs, query, go }) {
  let chosen = [...chosenRuns(runs, query)];
  let words = query.q ?? "";
  const place = h("div");
  const count = h("span", { class: "dim", id: "count" });
  const field = h("input", { type: "search", id: "run-filter", placeholder: "folder, name, model, explorer   /", "aria-label": "filter", oninput: (event) => { words = event.target.value; note({ q: words }); draw(true); } });
  field.value = words;
  const compare = h("button", { id: "compare", onclick: () => go(to.overview({ runs: joined(chosen) })) });
  const differ = h("button", { onclick: () => go(to.settings({ runs: joined(chosen) })) }, "their settings");

  const toggle = (name, is) => {
    chosen = is ? [...chosen, name] : chosen.filter((one) => one !== name);
    chosenRuns(runs, { runs: joined(chosen) });
    note({ runs: joined(chosen) || "," });
    draw();
  };
  const columns = [
    { key: "chosen", label: "✓", keep: true, title: "chosen for the overview and the settings", of: (run) => (chosen.includes(run.name) ? 0 : 1), show: (run) => {
      const box = h("input", { type: "checkbox", disabled: Boolean(run.error), "aria-label": `compare ${run.name}`, onchange: (event) => toggle(run.name, event.target.checked) });
      box.checked = chosen.includes(run.name);
      const mark = h("i", { class: "swatch" });
      if (box.checked) mark.style.setProperty("--own", colourOf(run.name));
      return h("label", { class: "pick" }, box, mark);
    } },
    { key: "name", label: "run", lead: true, keep: true, text: true, name: true, of: (run) => run.name, show: (run) => plain(run.name) },
    { key: "folder", label: "folder", text: true, clip: true, of: (run) => run.folder, show: (run) => plain(run.folder) },
    { key: "state", label: "state", text: true, keep: true, of: (run) => STATES[stateOf(run)], show: (run) => h("span", { class: { running: "pulse", damaged: "bad" }[stateOf(run)] ?? "dim", title: plain(run.error ?? "") }, run.error ? `cannot be read: ${plain(run.error).slice(0, 120)}` : stateOf(run)) },
    { key: "update", label: "updates", keep: true, of: (run) => run.update, show: (run) => `${run.update}/${run.num_updates}` },
    { key: "explorers", label: "explorers", text: true, clip: true, of: (run) => run.explorers, show: (run) => h("span", { title: plain(run.explorers) }, plain(run.explorers)) },
    { key: "model", label: "model", text: true, of: (run) => run.model, clip: true, show: (run) => h("span", { title: plain(run.model) }, plain(ending(run.model))) },
    { key: "seed", label: "seed", of: (run) => (Number.isNaN(Number(run.seed)) ? run.seed : Number(run.seed)), show: (run) => plain(run.seed) },
    { key: "reward", label: "reward", title: "mean reward of the last update", of: (run) => run.last["reward/mean"] },
    { key: "greedy", label: "greedy", title: "held-out accuracy of the last greedy evaluation", of: (run) => run.last["eval/accuracy"], show: (run) => percent(run.last["eval/accuracy"]) },
    { key: "sampled", label: "sampled", title: "held-out accuracy of the last sampled evaluation", of: (run) => run.last["eval/accuracy_sampled"], show: (run) => percent(run.last["eval/accuracy_sampled"]) },
    { key: "calls", label: "tool calls", of: (run) => run.sums.calls, show: (run) => (run.sums.calls === undefined ? "–" : short(run.sums.calls)) },
    { key: "tokens", label: "tokens", title: "sampled tokens", of: (run) => run.sums.tokens, show: (run) => (run.sums.tokens === undefined ? "–" : short(run.sums.tokens)) },
    { key: "time", label: "time", title: "by the clock, warm-up and evaluations included", of: (run) => run.sums.wall_s, show: (run) => (run.sums.wall_s === undefined ? "–" : duration(run.sums.wall_s)) },
    { key: "newest", label: "written", title: "when it last wrote", of: (run) => run.newest, same: (run) => run.name, show: (run) => ago(run.newest) },
  ];
  const drawList = makeList(place, { id: "runs", columns, query, first: "newest", down: true, address: (run) => to.updates(run.name), empty: () => "No run is like that." });
  const draw = (isNew = false) => {
    const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
    const found = runs.filter((run) => wanted.every((word) => `${run.folder}/${run.name} ${run.model} ${run.explorers} ${stateOf(run)}`.toLowerCase().includes(word)));
    count.textContent = found.length === runs.length ? plural(runs.length, "run") : `${found.length} of ${plural(runs.length, "run")}`;
    replace(compare, `compare ${chosen.length} chosen`);
    compare.disabled = differ.disabled = !chosen.length;
    drawList(found, isNew);
  };
  replace(page, h("div", { class: "title" }, h("h1", null, "Runs"), count, field, compare, differ, h("button", { onclick: () => { chosen = []; toggle("", false); }, title: "choose no run" }, "none")), place);
  draw();
  return { title: "runs", refresh: () => draw() };
}
