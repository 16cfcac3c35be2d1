// The frame around the pages: address to page, keys, themes, and the watch on runs that are being written.

import { answerFrom, fileTitle, get, here, link, to } from "./api.js";
import { fromFiles, isBundle, madeAt } from "./bundle.js";
import { chosenRuns } from "./chosen.js";
import { h, hideTip, replace } from "./dom.js";
import { overview } from "./overview.js";
import { groups, search, task, updates } from "./lists.js";
import { runsPage } from "./runs.js";
import { settingsPage } from "./settings.js";
import { treePage } from "./tree.js";
import { versus } from "./versus.js";
import { bufferPage, tracePage } from "./buffer.js";

let page = document.getElementById("page");
const bar = document.getElementById("bar");
const help = document.getElementById("help");
let runs = [];
let current = null;
let turn = 0;
let following = false;
let isGoing = false;

// Pages by the letter after g. Single keys belong to what a page shows.
const PLACES = [
  ["r", "runs", "Runs", () => to.runs()],
  ["o", "overview", "Overview", () => to.overview()],
  ["c", "settings", "Settings", () => to.settings()],
  ["u", "updates", "Updates", (run) => to.updates(run)],
  ["s", "search", "Search", (run) => to.search(run)],
  ["b", "buffer", "Buffer", (run) => to.buffer(run)],
];
const GENERAL = [
  ["?", "these keys"],
  ...PLACES.map(([key, , label]) => [`g ${key}`, label.toLowerCase()]),
  ["/", "to the search field"],
  ["Esc", "one level up"],
  ["d", "dark or light"],
  ["f", "follow the newest update of a running run"],
];

// ---- themes

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("theme", name);
  } catch {
    // A browser may refuse storage; the theme then lasts as long as the page.
  }
}

function firstTheme() {
  let kept = here().query.theme;
  try {
    kept = kept ?? localStorage.getItem("theme");
  } catch {
    kept = kept ?? null;
  }
  return kept ?? (matchMedia("(prefers-color-scheme: light)").matches ? "light" : "dark");
}

const otherTheme = () => (document.documentElement.dataset.theme === "dark" ? "light" : "dark");

function switchTheme() {
  setTheme(otherTheme());
  current?.restyle?.();
}

// ---- address to page

function choose(parts, query) {
  const context = { runs, query, go: (address) => (location.hash = address) };
  if (parts.length === 0) return { make: () => overview(page, context), up: null, tab: "overview" };
  if (parts[0] === "runs" && parts.length === 1) return { make: () => runsPage(page, context), up: to.overview(), tab: "runs" };
  if (parts[0] === "settings" && parts.length === 1) return { make: () => settingsPage(page, context), up: to.overview(), tab: "settings" };
  const [, run, kind, a, b, c] = parts;
  const known = runs.find((one) => one.name === run);
  if (parts[0] !== "r" || !known) throw new Error(`There is no run "${run ?? parts[0]}" here.`);
  const ctx = { ...context, run };
  if (!kind) return { make: () => updates(page, ctx), up: to.overview(), tab: "updates", run };
  if (kind === "s") return { make: () => search(page, ctx), up: to.updates(run), tab: "search", run };
  if (kind === "task") return { make: () => task(page, ctx, query.id ?? ""), up: to.updates(run), tab: "updates", run };
  if (kind === "buffer" && a) return { make: () => tracePage(page, ctx, a), up: to.buffer(run), tab: "buffer", run };
  if (kind === "buffer") return { make: () => bufferPage(page, ctx), up: to.updates(run), tab: "buffer", run };
  if (kind === "t" && c === "vs") return { make: () => versus(page, ctx, a, Number(b)), up: to.tree(run, a, b), tab: "updates", run };
  if (kind === "t" && b !== undefined) return { make: () => treePage(page, ctx, a, Number(b)), up: to.groups(run, a), tab: "updates", run };
  if (kind === "t") return { make: () => groups(page, ctx, a), up: to.updates(run), tab: "updates", run };
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
    { "aria-label": "run", id: "run-picker", onchange: (event) => (location.hash = link(["r", event.target.value, ...(tab === "search" ? ["s"] : tab === "buffer" ? ["buffer"] : [])])) },
    runs.map((r) => h("option", { value: r.name }, r.folder ? `${r.folder}/${r.name}` : r.name)),
  );
  picker.value = name ?? "";
  const tabs = (some) => h("nav", null, some.map(([key, id, label, address]) => h("a", { href: address(name), "aria-current": id === tab && "page", title: `keys g ${key}` }, label)));
  const crumbs = parts[2] === "t" ? [h("a", { href: to.groups(name, parts[3]) }, fileTitle(parts[3])), parts[4] !== undefined && h("a", { href: to.tree(name, parts[3], parts[4]) }, `group ${parts[4]}`)] : [];
  replace(
    bar,
    h("a", { class: "brand", href: to.overview() }, "treegraft"),
    tabs(PLACES.slice(runs.length > 1 ? 0 : 1, 3)),
    picker,
    tabs(PLACES.slice(3)),
    h("span", { class: "crumbs" }, crumbs.filter(Boolean).map((crumb) => [" › ", crumb])),
    h("span", { class: "spring" }),
    h("span", { id: "live" }, liveText(one)),
    h("button", { onclick: switchTheme, title: "key d" }, "theme"),
    h("button", { onclick: showHelp, title: "key ?" }, "keys"),
  );
}

function liveText(run) {
  if (!run) return "";
  const progress = `update ${run.update} of ${run.num_updates}`;
  if (made) return h("span", { class: "dim", title: "A copy: it does not follow the run, and cannot search by similarity." }, `${progress}, copy of ${made}`);
  if (!run.is_live) return [h("span", { class: "dim" }, progress)];
  return [h("b", { class: "pulse" }, "running"), ` ${progress} `, h("button", { "aria-pressed": String(following), onclick: toggleFollow, title: "key f" }, following ? "following" : "follow")];
}

// ---- the watch

function toggleFollow() {
  following = !following;
  refreshLive();
  if (following) followNewest();
}

function refreshLive() {
  const place = document.getElementById("live");
  const one = runs.find((r) => r.name === runInView());
  if (place) replace(place, liveText(one));
}

async function followNewest() {
  const { parts } = here();
  if (parts[0] !== "r" || parts[2] !== "t") return;
  const { files } = await get(`runs/${encodeURIComponent(parts[1])}`);
  const newest = files.filter((file) => file.kind === "update").at(-1);
  if (newest && newest.name !== parts[3]) location.hash = parts[4] === undefined ? to.groups(parts[1], newest.name) : to.tree(parts[1], newest.name, parts[4]);
}

const statesOf = () => JSON.stringify(runs.map((r) => [r.era, r.num_lines, r.newest]));

function showFault(text) {
  const place = document.getElementById("live");
  if (place) replace(place, h("b", { class: "bad" }, text));
}

async function lookAgain() {
  const before = statesOf();
  try {
    runs.splice(0, runs.length, ...(await get("runs")));
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
      if (following) await followNewest();
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
  replace(help, h("h2", null, "Keys"), rows(GENERAL), current?.keys && h("h2", null, "On this page"), current?.keys && rows(current.keys.map(([key, text]) => [key, text])), h("form", { method: "dialog" }, h("button", null, "close")));
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
  const asked = isGoing && PLACES.find(([key]) => key === event.key);
  isGoing = event.key === "g" && !isGoing;
  const own = (current?.keys ?? []).find(([keys]) => keys.split(" ").includes(event.key));
  if (asked) location.hash = asked[3](runInView());
  else if (isGoing) return;
  else if (own) own[2](event.key);
  else if (event.key === "?") showHelp();
  else if (event.key === "d") switchTheme();
  else if (event.key === "f") toggleFollow();
  else if (event.key === "Escape" && current?.up) location.hash = current.up;
  else if (event.key === "/") page.querySelector("input[type=search], textarea")?.focus();
  else return;
  event.preventDefault();
}

setTheme(firstTheme());
if (isBundle) answerFrom(fromFiles);
const made = isBundle ? await madeAt() : null;
runs = await get("runs");
// Of many runs some are chosen first.
if (!location.hash && runs.length > 8) history.replaceState(null, "", to.runs());
addEventListener("hashchange", show);
addEventListener("keydown", onKey);
addEventListener("scroll", hideTip, true);
await show();
if (!isBundle) setTimeout(watch, 2000);
