// The frame around the pages: address to page, keys, and the watch on runs that are being written.

import { fileTitle, get, here, link, to } from "./api.js";
import { chosenRuns } from "./chosen.js";
import { h, hideTip, replace } from "./dom.js";
import { overview } from "./overview.js";
import { groups, updates } from "./lists.js";
import { runsPage } from "./runs.js";
import { settingsPage } from "./settings.js";
import { treePage } from "./tree.js";

let page = document.getElementById("page");
const bar = document.getElementById("bar");
const help = document.getElementById("help");
let runs = [];
let current = null;
let turn = 0;

const TABS = [
  { id: "runs", label: "Runs", address: () => to.runs() },
  { id: "overview", label: "Overview", address: () => to.overview() },
  { id: "settings", label: "Settings", address: () => to.settings() },
];
const RUN_TABS = [
  { id: "updates", label: "Updates", address: (run) => to.updates(run) },
];
const GENERAL = [
  ["?", "these keys"],
  ["/", "to the search field"],
  ["Esc", "one level up"],
];

// ---- address to page

function choose(parts, query) {
  const context = { runs, query, go: (address) => (location.hash = address) };
  if (parts.length === 0) return { make: () => overview(page, context), up: null, tab: "overview" };
  if (parts[0] === "runs" && parts.length === 1) return { make: () => runsPage(page, context), up: to.overview(), tab: "runs" };
  if (parts[0] === "settings" && parts.length === 1) return { make: () => settingsPage(page, context), up: to.overview(), tab: "settings" };
  const [, run, kind, file, number] = parts;
  const known = runs.find((one) => one.name === run);
  if (parts[0] !== "r" || !known) throw new Error(`There is no run "${run ?? parts[0]}" here.`);
  const ctx = { ...context, run };
  if (!kind) return { make: () => updates(page, ctx), up: to.overview(), tab: "updates", run };
  if (kind === "t" && number !== undefined) return { make: () => treePage(page, ctx, file, Number(number)), up: to.groups(run, file), tab: "updates", run };
  if (kind === "t") return { make: () => groups(page, ctx, file), up: to.updates(run), tab: "updates", run };
  throw new Error("There is no such page.");
}

async function show() {
  const mine = ++turn;
  hideTip();
  current?.close?.();
  current = null;
  const { parts, query } = here();
  let chosen = null;
  // A page of its own for each address: one that is still loading when the reader has gone on draws where nobody looks.
  const before = page;
  page = before.cloneNode(false);
  page.append(...before.childNodes);
  before.replaceWith(page);
  page.className = "";
  try {
    chosen = choose(parts, query);
    current = { up: chosen.up }; // the way up is open while the page loads
    drawBar(chosen, parts);
    const made = await chosen.make();
    if (mine !== turn) {
      made?.close?.();
      return;
    }
    current = { ...made, up: chosen.up };
  } catch (error) {
    if (mine !== turn) return;
    if (chosen === null) drawBar({ tab: "", run: runs[0]?.name }, parts);
    replace(page, h("div", { class: "notice bad" }, error.message), h("p", null, h("a", { href: to.overview() }, "to the overview")));
    current = { up: chosen?.up ?? to.overview() };
  }
  document.title = [current?.title, parts[1], "Treegraft"].filter(Boolean).join(" · ");
  page.dataset.ready = String(mine);
}

// The run that pages of one run show: that of the address, or the first of those that are compared.
const runInView = () => {
  const { parts, query } = here();
  return parts[0] === "r" ? parts[1] : (lastRun ?? chosenRuns(runs, query)[0] ?? runs[0]?.name);
};
let lastRun = null;

function drawBar({ tab, run }, parts) {
  if (run) lastRun = run;
  const name = run ?? runInView();
  const one = runs.find((r) => r.name === name);
  const picker = h(
    "select",
    { "aria-label": "run", id: "run-picker", onchange: (event) => (location.hash = to.updates(event.target.value)) },
    runs.map((r) => h("option", { value: r.name }, r.folder ? `${r.folder}/${r.name}` : r.name)),
  );
  picker.value = name ?? "";
  const tabs = (some) => h("nav", null, some.map(({ id, label, address }) => h("a", { href: address(name), "aria-current": id === tab && "page" }, label)));
  const crumbs = parts[2] === "t" ? [h("a", { href: to.groups(name, parts[3]) }, fileTitle(parts[3])), parts[4] !== undefined && h("a", { href: to.tree(name, parts[3], parts[4]) }, `group ${parts[4]}`)] : [];
  replace(
    bar,
    h("a", { class: "brand", href: to.overview() }, "treegraft"),
    tabs(runs.length > 1 ? TABS : TABS.slice(1)),
    picker,
    tabs(RUN_TABS),
    h("span", { class: "crumbs" }, crumbs.filter(Boolean).map((crumb) => [" › ", crumb])),
    h("span", { class: "spring" }),
    h("span", { id: "live" }, liveText(one)),
    h("button", { onclick: showHelp, title: "key ?" }, "keys"),
  );
}

function liveText(run) {
  if (!run) return "";
  const progress = `update ${run.update} of ${run.num_updates}`;
  if (!run.is_live) return [h("span", { class: "dim" }, progress)];
  return [h("b", { class: "pulse" }, "running"), ` ${progress}`];
}

// ---- the watch

function refreshLive() {
  const place = document.getElementById("live");
  const one = runs.find((r) => r.name === runInView());
  if (place) replace(place, liveText(one));
}

const statesOf = () => JSON.stringify(runs.map((r) => [r.num_lines, r.newest]));

function showFault(text) {
  const place = document.getElementById("live");
  if (place) replace(place, h("b", { class: "bad" }, text));
}

// A run whose files are damaged has an error alone.
const NOTHING = { num_lines: 0, newest: 0, update: 0, num_updates: 0, is_over: false, is_live: false, last: {}, sums: {}, explorers: "", model: "", seed: "" };
const states = async () => (await get("runs")).map((run) => ({ ...NOTHING, ...run }));

async function lookAgain() {
  const before = statesOf();
  try {
    runs.splice(0, runs.length, ...(await states()));
  } catch {
    document.body.classList.add("gone");
    showFault("the viewer has ended");
    return;
  }
  const wasGone = document.body.classList.contains("gone");
  document.body.classList.remove("gone");
  if (wasGone || before !== statesOf()) {
    refreshLive();
    try {
      await current?.refresh?.();
    } catch (error) {
      showFault(`this page is not up to date: ${error.message}`);
    }
  }
}

async function watch() {
  if (!document.hidden) await lookAgain();
  setTimeout(watch, 2000);
}

// ---- keys

function showHelp() {
  const rows = (list) => h("table", null, list.map(([key, text]) => h("tr", null, h("td", null, key.split(" ").map((k) => [h("kbd", null, k), " "])), h("td", null, text))));
  replace(help, h("h2", null, "Keys"), rows(GENERAL), current?.keys && h("h2", null, "On this page"), current?.keys && rows(current.keys), h("form", { method: "dialog" }, h("button", null, "close")));
  help.showModal();
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (event.key === "Enter" && event.target.closest("a,button")) return;
  const own = (current?.keys ?? []).find(([keys]) => keys.split(" ").includes(event.key));
  if (own) own[2](event.key);
  else if (event.key === "?") showHelp();
  else if (event.key === "Escape" && current?.up) location.hash = current.up;
  else if (event.key === "/") page.querySelector("input[type=search]")?.focus();
  else return;
  event.preventDefault();
}

runs = await states();
// Of many runs some are chosen first.
if (!location.hash && runs.length > 8) history.replaceState(null, "", to.runs());
addEventListener("hashchange", show);
addEventListener("keydown", onKey);
addEventListener("scroll", hideTip, true);
await show();
setTimeout(watch, 2000);
// Charts are drawn with the colours of the theme.
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => current?.restyle?.());
