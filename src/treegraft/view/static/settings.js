// The settings of the chosen runs: those that differ first, then what is not the default, then all.

import { get, note, runPath, to } from "./api.js";
import { chosenRuns, colourOf } from "./chosen.js";
import { h, plain, plural, replace } from "./dom.js";

const told = (value) => (value === undefined ? "–" : value === null ? "none" : Array.isArray(value) ? (value.length ? value.map((one) => (typeof one === "object" ? JSON.stringify(one) : String(one))).join(", ") : "none") : typeof value === "object" ? JSON.stringify(value) : value === "" ? '""' : String(value));
const same = (a, b) => JSON.stringify(a ?? null) === JSON.stringify(b ?? null);

export async function settingsPage(page, { runs, query }) {
  const chosen = chosenRuns(runs, query);
  let words = query.q ?? "";
  const known = new Map((await get("settings")).map((row) => [row.name, row]));
  const failed = [];
  const loaded = (await Promise.all(chosen.map(async (name) => {
    try {
      return { name, settings: (await get(runPath(name))).settings };
    } catch (error) {
      failed.push(`${name}: ${error.message}`);
      return null;
    }
  }))).filter(Boolean);
  const names = [...new Set([...known.keys(), ...loaded.flatMap((run) => Object.keys(run.settings))])].filter((name) => loaded.some((run) => name in run.settings));
  const differs = (name) => loaded.some((run) => !same(run.settings[name], loaded[0].settings[name]) || name in run.settings !== name in loaded[0].settings);
  const isOwn = (name) => known.has(name) && !known.get(name).follows && !same(loaded[0].settings[name], known.get(name).default);
  const fits = (name) => words.toLowerCase().split(/\s+/).filter(Boolean).every((word) => `${name} ${known.get(name)?.meaning ?? ""} ${loaded.map((run) => told(run.settings[name])).join(" ")}`.toLowerCase().includes(word));

  const cell = (text, label) => h("td", { class: "value", "data-label": label }, h("code", { class: "foreign" }, plain(text)));
  const setting = (name) => h("th", { scope: "row", class: "text" }, h("code", null, plain(name)), h("small", null, plain(known.get(name)?.meaning ?? "")));
  const defaultOf = (name) => (known.get(name)?.follows ? "follows other settings" : told(known.get(name)?.default));
  // One column where all runs agree, one for each run where they do not.
  function table(id, rows, each) {
    const heads = each ? loaded.map((run) => { const swatch = h("i", { class: "swatch" }); swatch.style.setProperty("--own", colourOf(run.name)); return h("th", { class: "text" }, swatch, h("a", { href: to.updates(run.name) }, run.name)); }) : [h("th", { class: "text" }, loaded.length > 1 ? "value of all" : "value")];
    return h("div", { class: "scroll" }, h("table", { class: "settings", id }, h("thead", null, h("tr", null, h("th", { class: "text" }, "setting"), heads, h("th", { class: "text" }, "default"))),
      h("tbody", null, rows.map((name) => h("tr", null, setting(name), each ? loaded.map((run) => cell(told(run.settings[name]), run.name)) : cell(told(loaded[0].settings[name]), "value"), h("td", { class: "value dim", "data-label": "default" }, plain(defaultOf(name))))))));
  }

  const field = h("input", { type: "search", id: "setting-filter", placeholder: "name, meaning or value   /", "aria-label": "filter", oninput: (event) => { words = event.target.value; note({ q: words }); draw(); } });
  field.value = words;
  const body = h("div", { class: "settingsbody" });
  function draw() {
    const all = names.filter(fits);
    const differing = all.filter(differs);
    const own = all.filter((name) => !differs(name) && isOwn(name));
    const rest = all.filter((name) => !differs(name) && !isOwn(name));
    const tables = [...new Set(rest.map((name) => name.split(".")[0]))];
    replace(body,
      h("div", null, loaded.length > 1 && h("section", null, h("h2", null, differing.length ? `${plural(differing.length, "setting")} in which these runs differ` : words ? "None of those that differ is like that." : "These runs have equal settings."), differing.length > 0 && table("differing", differing, true)),
      h("section", null, h("h2", null, own.length ? `${plural(own.length, "setting")}${loaded.length > 1 ? " that they share and" : ""} that ${own.length === 1 ? "is" : "are"} not the default` : "No other setting differs from its default."), own.length > 0 && table("own", own, false))),
      h("section", null, h("h2", null, `Defaults (${rest.length})`), tables.map((one) => { const some = rest.filter((name) => name.split(".")[0] === one); return h("details", { open: Boolean(words) }, h("summary", null, h("code", null, one), ` ${some.length}`), table(null, some, false)); })));
  }
  replace(page, h("div", { class: "title" }, h("h1", null, loaded.length === 1 ? `Settings of ${loaded[0].name}` : "Settings"), field, runs.length > 1 && h("a", { href: to.runs() }, "choose runs")), failed.map((one) => h("p", { class: "notice bad" }, one)), loaded.length ? body : h("p", { class: "notice" }, "No run is chosen."));
  if (loaded.length) draw();
  return { title: "settings" };
}
