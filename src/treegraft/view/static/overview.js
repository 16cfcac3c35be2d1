// The overview: the main metrics of one run or of several, over each other.

import { get, note, runPath, to } from "./api.js";
import { chart, runColour, smooth, wilson } from "./charts.js";
import { h, num, plain, replace } from "./dom.js";

const share = (value, digits) => `${num(100 * value, digits)} %`;
const CARDS = [
  { title: "Reward", keys: [["reward/mean", "mean"]], about: "mean reward of scored leaves, each group weighing the same" },
  { title: "Held-out accuracy", eval: true, format: share, range: [0, 1], about: "" },
  { title: "Entropy", keys: [["learn/entropy", "entropy"]], about: "mean entropy of sampled tokens under the policy, in nats" },
  { title: "Tool calls", keys: [["rollout/tool_calls_mean", "rollouts"], ["eval/tool_calls_mean", "held-out", true]], about: "mean tool calls of a trajectory; dashed: held-out" },
  { title: "Retrieved", keys: [["graft/hybrid_frac", "trajectories with a graft"], ["rollout/retrieved_frac", "retrieved tokens", true]], format: share, about: "share of trajectories that hold a graft; dashed: share of tokens after the prompt" },
  { title: "Branched", keys: [["*branched", "branches per trajectory"]], format: share, about: "branches that explorers opened, per trajectory" },
  { title: "Time", time: true, about: "seconds of an update, its parts stacked" },
];
const PARTS = [["rollout", "time/rollout_s"], ["learn", "time/learn_s"], ["publish", "time/publish_s"], ["evaluation", "time/eval_s"]];

function value(line, key) {
  if (key === "*branched") return line["rollout/num_trajectories"] ? line["branch/num_branches"] / line["rollout/num_trajectories"] : null;
  return typeof line[key] === "number" ? line[key] : null;
}

function allUpdates(shown) {
  return [...new Set(shown.flatMap((run) => run.lines.map((line) => line.update)))].sort((a, b) => a - b);
}

const over = (run, x, read) => {
  const by = new Map(run.lines.map((line) => [line.update, line]));
  return x.map((update) => (by.has(update) ? read(by.get(update)) : null));
};

export async function overview(page, { runs, query, go }) {
  const [loaded, partial] = [new Map(), new Map()];
  let chosen = query.runs ? query.runs.split(",").filter((name) => runs.some((run) => run.name === name)) : runs.filter((run) => !run.error).slice(0, 6).map((run) => run.name);
  let weight = Number(query.smooth ?? 0);
  let extra = query.more ? query.more.split(",") : [];
  let plots = [];
  const colourOf = (name) => runColour(runs.findIndex((run) => run.name === name));

  async function load(name) {
    const known = loaded.get(name);
    const got = await get(runPath(name, "/metrics"), known ? { first: known.lines.length, era: known.era } : {});
    const lines = known && got.era === known.era ? [...known.lines.slice(0, got.first), ...got.lines] : got.lines;
    loaded.set(name, { name, era: got.era, lines, numEval: got.num_eval, rules: got.rules });
    const parts = [got.read_frac < 1 && `${share(got.read_frac, 2)} of its metrics read so far`, got.stride > 1 && `every ${got.stride}th update shown`];
    partial.set(name, parts.filter(Boolean).join(", "));
  }

  const legend = h("div", { class: "legend", id: "run-legend" });
  const grid = h("div", { class: "cards" });
  const warnings = h("div", { class: "warnings" });
  const amount = h("output", null, String(weight));
  const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: weight, id: "smooth", oninput: (event) => setSmooth(Number(event.target.value)) });
  const more = h("select", { id: "more", onchange: (event) => addChart(event.target.value) });
  replace(page, h("div", { class: "tools" }, legend, h("span", { class: "spring" }), h("label", null, "smoothing ", slider, " ", amount), more), grid, warnings);

  function setSmooth(to) {
    weight = Math.min(0.95, Math.max(0, Math.round(to * 20) / 20));
    slider.value = weight;
    amount.textContent = String(weight);
    note({ smooth: weight || "" });
    draw();
  }

  function addChart(key) {
    if (key && !extra.includes(key)) extra = [...extra, key];
    note({ more: extra.join(",") });
    draw();
  }

  function toggle(name) {
    chosen = chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name];
    note({ runs: chosen.join(",") });
    update();
  }

  function drawLegend(shown) {
    replace(
      legend,
      runs.map((run) => {
        const swatch = h("i", { class: "swatch" });
        swatch.style.background = colourOf(run.name);
        const last = shown.find((one) => one.name === run.name)?.lines.at(-1);
        return h("button", { class: "run", "aria-pressed": String(chosen.includes(run.name)), onclick: () => toggle(run.name), title: plain(run.error ?? run.path), disabled: Boolean(run.error) }, swatch, run.name, run.error && h("small", { class: "bad" }, ` cannot be read: ${run.error}`), last && h("small", null, ` ${last.update}/${run.num_updates}${run.is_live ? " running" : ""}${partial.get(run.name) ? `; ${partial.get(run.name)}` : ""}`));
      }),
    );
  }

  function seriesOf(card, shown, x) {
    const found = [];
    for (const run of shown) {
      const colour = colourOf(run.name);
      const prefix = shown.length > 1 ? `${run.name} ` : "";
      if (card.eval) {
        const key = run.lines.some((line) => typeof line["eval/accuracy"] === "number") ? "eval/accuracy" : "eval/accuracy_sampled";
        const values = over(run, x, (line) => value(line, key));
        if (!values.some((v) => v !== null)) continue;
        const interval = values.map((v) => wilson(v, run.numEval));
        found.push({ label: `${prefix}${key === "eval/accuracy" ? "greedy" : "sampled"}`, colour, values, low: interval.map((i) => i[0]), high: interval.map((i) => i[1]), points: true });
        const counts = [...new Set(shown.map((one) => one.numEval).filter(Boolean))];
        card.about = `share of ${counts.join(" or ")} held-out tasks; band: Wilson's 95 % interval`;
        continue;
      }
      for (const [key, label, dashed] of card.keys) {
        const raw = over(run, x, (line) => value(line, key));
        if (!raw.some((v) => v !== null)) continue;
        if (weight) found.push({ label: null, colour: `${colour}55`, values: raw, thin: true, hidden: true });
        found.push({ label: prefix + label, colour, raw, values: smooth(raw, weight), dash: dashed ? [5, 4] : undefined, points: raw.filter((v) => v !== null).length < 12 });
      }
    }
    return found;
  }

  function timeSeries(run, x) {
    const by = PARTS.map(([name, key]) => [name, over(run, x, (line) => value(line, key) ?? 0)]);
    const total = over(run, x, (line) => value(line, "time/update_s") ?? value(line, "time/eval_s"));
    const rest = total.map((t, n) => (t === null ? 0 : Math.max(0, t - by.reduce((sum, [, values]) => sum + values[n], 0))));
    const parts = [...by, ["other", rest]];
    // Bars, drawn from the whole down, so that each part covers what lies below it.
    const found = parts.map(([name, values], place) => ({ label: name, raw: values, colour: runColour(place), values: values.map((_, n) => parts.slice(0, place + 1).reduce((sum, [, v]) => sum + v[n], 0)) }));
    return found.reverse();
  }

  function drawCard(card, shown, x, marks) {
    const runsOf = card.time ? shown.slice(0, 3).map((run) => [run]) : [shown];
    for (const some of runsOf) {
      // The parts of a run's time are areas: they end where the run does, however long others are.
      const own = card.time ? allUpdates(some) : x;
      const series = card.time ? timeSeries(some[0], own) : seriesOf(card, some, x);
      const place = h("div", { class: "plot" });
      const title = card.time && shown.length > 1 ? `${card.title}: ${some[0].name}` : card.title;
      const keys = card.time ? series.map((one) => { const i = h("i", { class: "swatch" }); i.style.background = one.colour; return h("span", null, i, one.label); }).reverse() : [];
      const box = h("section", { class: "card", "data-card": card.title }, h("h2", null, title, h("span", { class: "keys" }, keys)), series.length ? place : h("p", { class: "dim" }, "Not in these runs."), h("p", { class: "about" }, card.about));
      grid.append(box);
      if (!series.length) continue;
      const pick = (update) => { if (update > 0) go(to.groups(some[0].name, `update-${String(update).padStart(6, "0")}`)); };
      plots.push(chart(place, { x: own, series: series.map((one) => (one.hidden ? { ...one, label: "", raw: one.values.map(() => null) } : one)), marks: card.time ? marks.filter((mark) => mark.run === some[0].name) : marks, range: card.range, format: card.format ?? num, sync: "updates", onPick: pick, stacked: card.time }));
    }
  }

  function draw() {
    plots.forEach((plot) => plot.destroy());
    plots = [];
    const shown = chosen.map((name) => loaded.get(name)).filter((run) => run && run.lines.length);
    drawLegend(shown);
    grid.replaceChildren();
    const marked = shown.flatMap((run) => run.lines.filter((line) => line.warnings.length).map((line) => ({ x: line.update, run: run.name, texts: line.warnings.map((one) => `${one.name}: ${one.text}`) })));
    if (!shown.length) {
      replace(grid, h("p", { class: "notice" }, chosen.length ? "No update is finished yet. This page shows each one as it ends." : "No run is chosen."));
    } else {
      const x = allUpdates(shown);
      const marks = marked.map((mark) => ({ x: mark.x, run: mark.run, colour: shown.length > 1 ? colourOf(mark.run) : null, texts: mark.texts.map((text) => (shown.length > 1 ? `${mark.run}: ${text}` : text)) }));
      for (const card of CARDS) drawCard(card, shown, x, marks);
      for (const key of extra) drawCard({ title: key, keys: [[key, key]], about: meanings[key] ?? "" }, shown, x, marks);
    }
    const keys = [...new Set(shown.flatMap((run) => run.lines.flatMap(Object.keys)))].filter((key) => key.includes("/") && !extra.includes(key)).sort();
    replace(more, h("option", { value: "" }, "add a chart …"), keys.map((key) => h("option", { value: key }, key)));
    replace(warnings, marked.length > 0 && h("h2", null, `Warnings (in ${marked.length === 1 ? "1 update" : `${marked.length} updates`})`), shown.map((run) => episodes(run, shown.length > 1)));
    grid.dataset.points = String(shown.reduce((sum, run) => sum + run.lines.length, 0));
  }

  // A warning with the updates in which it stood, its meaning and advice.
  function episodes(run, isNamed) {
    const found = new Map();
    for (const line of run.lines) for (const one of line.warnings) found.set(one.name, [...(found.get(one.name) ?? []), { update: line.update, ...one }]);
    const place = (one) => (one.update > 0 ? h("a", { href: to.groups(run.name, `update-${String(one.update).padStart(6, "0")}`), title: plain(one.text) }, String(one.update)) : "start");
    return [...found].sort((a, b) => b[1].at(-1).update - a[1].at(-1).update).map(([name, stood]) => {
      const rule = run.rules[stood[0].rule] ?? { meaning: "", causes: [], advice: "" };
      const shownPlaces = stood.length > 14 ? [...stood.slice(0, 6).map(place), "…", ...stood.slice(-6).map(place)] : stood.map(place);
      return h("article", { class: "warning", "data-warning": name },
        h("header", null, h("b", { class: "warn" }, `⚠ ${isNamed ? `${run.name}: ` : ""}${plain(name)}`), h("span", null, plain(stood.at(-1).text)), h("span", { class: "dim" }, stood.length === 1 ? "update " : `${stood.length} updates: `, shownPlaces.flatMap((one, n) => (n ? [" ", one] : [one])))),
        h("p", null, rule.meaning), h("p", null, h("b", null, "To do: "), rule.advice), rule.causes.length > 0 && h("p", { class: "dim" }, `Likely causes: ${rule.causes.join("; ")}.`));
    });
  }

  async function update() {
    await Promise.all(chosen.map(load));
    draw();
  }

  const meanings = await get("meanings");
  await update();
  let width = innerWidth;
  const onResize = () => {
    if (innerWidth !== width) {
      width = innerWidth;
      draw();
    }
  };
  addEventListener("resize", onResize);
  return {
    title: "overview",
    refresh: update,
    restyle: draw,
    close: () => {
      removeEventListener("resize", onResize);
      plots.forEach((plot) => plot.destroy());
    },
    keys: [
      ["+ =", "more smoothing", () => setSmooth(weight + 0.1)],
      ["-", "less smoothing", () => setSmooth(weight - 0.1)],
    ],
  };
}
