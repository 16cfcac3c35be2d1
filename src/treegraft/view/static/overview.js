// The overview: the main metrics of one run or of several, over each other.

import { get, note, runPath, to } from "./api.js";
import { AXES, chart, duration, smooth, wilson } from "./charts.js";
import { chosenRuns, colourOf, joined } from "./chosen.js";
import { h, num, plain, replace } from "./dom.js";

const share = (value, digits) => `${num(100 * value, digits)} %`;
const CARDS = [
  { title: "Reward", keys: [["reward/mean", "mean"]], about: "mean reward of scored leaves, each group weighing the same" },
  { title: "Held-out accuracy", eval: true, format: share, range: [0, 1], about: "" },
  { title: "Entropy", keys: [["learn/entropy", "entropy"]], about: "mean entropy of sampled tokens under the policy, in nats" },
  { title: "Tool calls", keys: [["rollout/tool_calls_mean", "rollouts"], ["eval/tool_calls_mean", "held-out", true]], about: "mean tool calls of a trajectory; dashed: held-out" },
  { title: "Retrieved", keys: [["graft/hybrid_frac", "trajectories with a graft"], ["rollout/retrieved_frac", "retrieved tokens", true]], format: share, about: "share of trajectories that hold a graft; dashed: share of tokens after the prompt" },
  { title: "Branches", keys: [["*branched", "branches per trajectory"]], about: "branches that explorers opened, per trajectory" },
  { title: "Time", keys: [["time/update_s", "update"], ["time/rollout_s", "rollouts", true]], format: (value) => duration(value), about: "seconds of an update; dashed: of its rollouts" },
];
// More runs than that are chosen on their own page.
const MOST_BUTTONS = 8;
const heightOf = () => (innerWidth >= 2000 ? 270 : 190);
const fileOf = (update) => `update-${String(update).padStart(6, "0")}`;

function value(line, key) {
  if (key === "*branched") return line["rollout/num_trajectories"] ? line["branch/num_branches"] / line["rollout/num_trajectories"] : null;
  return typeof line[key] === "number" ? line[key] : null;
}

export async function overview(page, { runs, query, go }) {
  const loaded = new Map();
  let chosen = chosenRuns(runs, query);
  let weight = Number(query.smooth ?? 0);
  let extra = query.more ? query.more.split(",") : [];
  let axis = AXES[query.x] ? query.x : "update";
  let plots = [];

  async function load(name) {
    const got = await get(runPath(name, "/metrics"));
    const lines = got.lines.map((line, n) => ({ ...line, at: Object.fromEntries(Object.entries(got.axes).map(([key, sums]) => [key, sums[n]])) }));
    loaded.set(name, { name, lines, stride: got.stride, numEval: got.num_eval, rules: got.rules });
  }

  const legend = h("div", { class: "legend", id: "run-legend" });
  const grid = h("div", { class: "cards" });
  const still = h("p", { class: "about still" });
  const warnings = h("div", { class: "warnings" });
  const amount = h("output", null, String(weight));
  const slider = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: weight, id: "smooth", oninput: (event) => setSmooth(Number(event.target.value)) });
  const over = h("select", { id: "axis", onchange: (event) => { axis = event.target.value; note({ x: axis === "update" ? "" : axis }); draw(); } }, Object.entries(AXES).map(([key, { label }]) => h("option", { value: key }, label)));
  over.value = axis;
  const more = h("select", { id: "more", "aria-label": "add a chart", onchange: (event) => addChart(event.target.value) });
  replace(page, h("div", { class: "tools" }, legend, h("span", { class: "spring" }), h("label", null, "over ", over), h("label", { class: "smoothing" }, "smoothing ", slider, amount), more), grid, still, warnings);

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

  function removeChart(key) {
    extra = extra.filter((one) => one !== key);
    note({ more: extra.join(",") });
    draw();
  }

  function toggle(name) {
    const names = chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name];
    chosen = chosenRuns(runs, { runs: joined(names) });
    note({ runs: joined(chosen) || "," });
    update();
  }

  function drawLegend(shown) {
    const listed = runs.length <= MOST_BUTTONS ? runs : runs.filter((run) => chosen.includes(run.name));
    replace(
      legend,
      listed.map((run) => {
        const swatch = h("i", { class: "swatch" });
        swatch.style.setProperty("--own", colourOf(run.name));
        const known = shown.find((one) => one.name === run.name);
        const thinned = known?.stride > 1 ? `; every ${known.stride}th update shown` : "";
        return h("button", { class: "run", "aria-pressed": String(chosen.includes(run.name)), onclick: () => toggle(run.name), title: plain(run.error ?? run.path), disabled: Boolean(run.error) }, swatch, run.name, run.error && h("small", { class: "bad" }, ` cannot be read: ${run.error}`), known && h("small", null, ` ${known.lines.at(-1).update}/${run.num_updates}${run.is_live ? " running" : ""}${thinned}`));
      }),
      listed.length < runs.length && h("a", { href: to.runs() }, `choose from ${runs.length} runs`),
    );
  }

  // ---- what is drawn over what

  // Every place on the x axis, with the lines there and their names in the tooltip.
  function placesOf(shown) {
    if (axis === "update") {
      // A click opens the first run that has the update.
      const first = new Map([...shown].reverse().flatMap((run) => run.lines.map((line) => [line.update, run.name])));
      const x = [...first.keys()].sort((a, b) => a - b);
      return { x, names: null, owners: x.map((update) => [first.get(update), update]) };
    }
    // One run's place is no other's: each has its own, and two at one place are one after the other.
    const all = shown.flatMap((run) => run.lines.filter((line) => line.at[axis] !== undefined).map((line) => [line.at[axis], run.name, line.update]));
    all.sort((a, b) => a[0] - b[0]);
    const most = all.at(-1)?.[0] ?? 0;
    return { x: all.map(([at]) => at), names: all.map(([at, name, update]) => `${AXES[axis].show(at, most)} ${AXES[axis].label}: ${shown.length > 1 ? `${name}, ` : ""}update ${update}`), owners: all.map(([, name, update]) => [name, update]) };
  }

  function valuesOver(run, { x, names, owners }, read) {
    const by = new Map(run.lines.map((line) => [line.update, line]));
    return x.map((_, n) => (names !== null && owners[n][0] !== run.name) || !by.has(owners[n][1]) ? null : read(by.get(owners[n][1])));
  }

  function seriesOf(card, shown, places) {
    const found = [];
    for (const run of shown) {
      const colour = colourOf(run.name);
      const prefix = shown.length > 1 ? `${run.name} ` : "";
      if (card.eval) {
        const key = run.lines.some((line) => typeof line["eval/accuracy"] === "number") ? "eval/accuracy" : "eval/accuracy_sampled";
        const values = valuesOver(run, places, (line) => value(line, key));
        if (!values.some((v) => v !== null)) continue;
        const interval = values.map((v) => wilson(v, run.numEval));
        found.push({ label: `${prefix}${key === "eval/accuracy" ? "greedy" : "sampled"}`, colour, values, low: interval.map((i) => i[0]), high: interval.map((i) => i[1]), points: true });
        continue;
      }
      for (const [key, label, dashed] of card.keys) {
        const raw = valuesOver(run, places, (line) => value(line, key));
        if (!raw.some((v) => v !== null)) continue;
        if (weight) found.push({ label: "", colour: `${colour}55`, values: raw, thin: true, hidden: true });
        found.push({ label: prefix + label, colour, raw, values: smooth(raw, weight), dash: dashed ? [5, 4] : undefined, points: raw.filter((v) => v !== null).length < 12 });
      }
    }
    return found;
  }

  const flatSeries = (series) => {
    const values = new Set(series.flatMap((one) => one.values.filter((v) => v !== null)));
    return values.size === 1 && values.has(0);
  };

  function drawCard(card, shown, places, marks) {
    const series = seriesOf(card, shown, places);
    if (!series.length) return;
    if (flatSeries(series) && !card.own) {
      quiet.push(card.title);
      return;
    }
    const counts = [...new Set(shown.map((one) => one.numEval).filter(Boolean))];
    const about = card.eval ? `share of ${counts.length ? `${counts.join(" or ")} ` : ""}held-out tasks; band: Wilson's 95 % interval` : card.about;
    const place = h("div", { class: "plot" });
    const head = [
      flatSeries(series) && "0 throughout",
      card.own && h("button", { class: "small", onclick: () => removeChart(card.own), "aria-label": `remove the chart of ${card.own}` }, "×")];
    grid.append(h("section", { class: "card", "data-card": card.title },
      h("h2", null, h("span", null, card.title), h("span", { class: "keys" }, head)), place, about && h("p", { class: "about" }, about)));
    const pick = (n) => { const [name, update] = places.owners[n]; if (update > 0) go(to.groups(name, fileOf(update))); };
    plots.push(chart(place, { x: places.x, series, marks, range: card.range, format: card.format ?? num, sync: axis, onPick: pick, axis: AXES[axis], names: places.names, height: heightOf() }));
  }

  // ---- the page

  let quiet = [];
  function draw() {
    plots.forEach((plot) => plot.destroy());
    plots = [];
    quiet = [];
    const shown = chosen.map((name) => loaded.get(name)).filter((run) => run && run.lines.length);
    drawLegend(shown);
    grid.replaceChildren();
    const warned = shown.flatMap((run) => run.lines.filter((line) => line.warnings.length).map((line) => ({ run: run.name, line })));
    if (!shown.length) {
      replace(grid, h("p", { class: "notice" }, chosen.length ? "No update is finished yet. This page shows each one as it ends." : "No run is chosen."));
    } else {
      if (!shown.some((run) => run.lines.some((line) => axis === "update" || line.at[axis] !== undefined))) over.value = axis = "update";
      const places = placesOf(shown);
      const marks = warned.map(({ run, line }) => ({ x: axis === "update" ? line.update : line.at[axis], texts: line.warnings.map((one) => `${shown.length > 1 ? `${run}: ` : ""}${one.name}: ${one.text}`) }));
      for (const card of CARDS) drawCard(card, shown, places, marks);
      for (const key of extra) drawCard({ title: key, own: key, keys: [[key, key]], about: meanings[key] ?? "" }, shown, places, marks);
    }
    replace(still, quiet.length > 0 && `0 throughout, not drawn: ${quiet.join(", ")}.`);
    const keys = [...new Set(shown.flatMap((run) => run.lines.flatMap(Object.keys)))].filter((key) => key.includes("/") && !extra.includes(key)).sort();
    replace(more, h("option", { value: "" }, "add a chart …"), keys.map((key) => h("option", { value: key }, key)));
    replace(warnings, warned.length > 0 && h("h2", null, `Warnings (in ${warned.length === 1 ? "1 update" : `${warned.length} updates`})`), shown.map((run) => episodes(run, shown.length > 1)));
    grid.dataset.points = String(shown.reduce((sum, run) => sum + run.lines.length, 0));
  }

  // A warning with the updates in which it stood, its meaning and advice.
  function episodes(run, isNamed) {
    const found = new Map();
    for (const line of run.lines) for (const one of line.warnings) found.set(one.name, [...(found.get(one.name) ?? []), { update: line.update, ...one }]);
    const place = (one) => (one.update > 0 ? h("a", { href: to.groups(run.name, fileOf(one.update)), title: plain(one.text) }, String(one.update)) : "start");
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
  };
}
