// Lists: the updates of a run, and the groups of an update.

import { fileTitle, get, here, note, runPath, to } from "./api.js";
import { flat, h, num, percent, plain, plural, replace } from "./dom.js";
import { makeList } from "./table.js";

// ---- updates

// An evaluation stands in the line of its update, whose rollouts and learning are not its own.
const ofUpdate = (key) => (row) => (row.kind === "update" ? row.m[key] : null);

const UPDATE_COLUMNS = [
  { key: "update", label: "update", of: (row) => row.update + (row.kind === "update" ? 0.5 : 0), lead: true, keep: true, show: (row) => fileTitle(row.name), text: true },
  { key: "reward", label: "reward", of: ofUpdate("reward/mean"), keep: true },
  { key: "accuracy", label: "accuracy", of: (row) => (row.kind === "update" ? row.m["rollout/accuracy"] : row.m[row.kind === "sampled" ? "eval/accuracy_sampled" : "eval/accuracy"]), title: "share of right answers: of the trajectories of an update, of the held-out tasks of an evaluation", show: (row) => percent(UPDATE_COLUMNS[2].of(row)) },
  { key: "entropy", label: "entropy", title: "mean entropy of sampled tokens, in nats", of: ofUpdate("learn/entropy") },
  { key: "branches", label: "branches", of: ofUpdate("branch/num_branches") },
  { key: "grafts", label: "grafts", of: ofUpdate("graft/num_grafts") },
  { key: "skipped", label: "no variance", title: "share of groups without variance of reward, skipped in learning", of: ofUpdate("learn/skipped_groups_frac"), show: (row) => percent(ofUpdate("learn/skipped_groups_frac")(row)) },
  { key: "ratio", label: "largest ratio", of: ofUpdate("learn/ratio_max") },
  { key: "tokens", label: "tokens", of: ofUpdate("rollout/num_sampled_tokens") },
  { key: "time", label: "seconds", of: (row) => row.m[row.kind === "update" ? "time/update_s" : "time/eval_s"], title: "of an update, evaluation included; of an evaluation: both kinds together" },
  { key: "warnings", label: "warnings", of: (row) => row.warnings.length, show: (row) => row.warnings.map((one) => h("span", { class: "warn badge", title: plain(`${one.text}\n${row.rules[one.rule]?.meaning ?? ""}\nTo do: ${row.rules[one.rule]?.advice ?? ""}`) }, `⚠ ${plain(one.name)}`, h("small", null, plain(one.text)))), text: true },
];

export async function updates(page, { run, query }) {
  let only = query.only ?? "";
  const place = h("div");
  const chooser = h("select", { "aria-label": "which", onchange: (event) => { only = event.target.value; note({ only }); draw(); } },
    [["", "updates and evaluations"], ["update", "updates"], ["eval", "evaluations"], ["warned", "with warnings"]].map(([value, label]) => h("option", { value }, label)));
  chooser.value = only;
  replace(page, h("div", { class: "tools" }, h("h1", null, run), chooser, h("span", { class: "spring" }), h("a", { href: to.settings({ runs: run }) }, "its settings")), place);
  let data = [];
  const drawList = makeList(place, { id: "updates", columns: UPDATE_COLUMNS, query, first: "update", down: true, address: (row) => to.groups(run, row.name), rowClass: (row) => (row.warnings.length ? "warned" : null),
    empty: () => (data.length ? "No row is like that." : "No trees are recorded yet (or track.record_trees is off).") });
  const draw = () => drawList(data.filter((row) => !only || (only === "warned" ? row.warnings.length : only === "eval" ? row.kind !== "update" : row.kind === only)));
  const load = async () => {
    const [one, metrics] = await Promise.all([get(runPath(run)), get(runPath(run, "/metrics"))]);
    const by = new Map(metrics.lines.map((line) => [line.update, line]));
    data = one.files.map((file) => {
      const line = by.get(file.update) ?? { warnings: [] };
      return { ...file, m: line, rules: metrics.rules, warnings: file.kind === "update" ? line.warnings : [] };
    });
    draw();
  };
  await load();
  return { title: "updates", refresh: load };
}

// ---- groups

const FLAGS = [["", "any"], ["1", "yes"], ["0", "no"]];
const FILTERS = [
  ["q", "question", "search"],
  ["status", "status", [["", "any"], ["completed", "completed"], ["truncated", "truncated"], ["format_violation", "format violation"], ["failed", "failed"]]],
  ["error", "tool error", FLAGS],
  ["graft", "graft", FLAGS],
  ["branch", "branch", FLAGS],
  ["mixed", "rewards differ", FLAGS],
];

function filters(query, onChange) {
  const values = Object.fromEntries(FILTERS.map(([name]) => [name, query[name] ?? ""]));
  let later = null;
  const change = (name, value) => {
    values[name] = value.trim();
    note({ [name]: values[name] });
    clearTimeout(later);
    later = setTimeout(() => onChange(values), 200);
  };
  const fields = FILTERS.map(([name, label, kind]) => {
    const field = Array.isArray(kind)
      ? h("select", { id: `f-${name}`, onchange: (event) => change(name, event.target.value) }, kind.map(([value, text]) => h("option", { value }, text)))
      : h("input", { id: `f-${name}`, type: "search", placeholder: "question or category   /", oninput: (event) => change(name, event.target.value) });
    field.value = values[name];
    return h("label", { class: kind === "search" ? "wide" : null }, label, " ", field);
  });
  return { values, element: h("div", { class: "tools filters" }, fields), cancel: () => clearTimeout(later) };
}

// The leaves of a group that match: one leaf has to meet all conditions on leaves.
function matches(row, values) {
  const is = (wanted, found) => wanted === "" || (wanted === "1") === found;
  const isFound = `${row.question} ${row.category}`.toLowerCase().includes(values.q.toLowerCase());
  if (!isFound || !is(values.mixed, row.reward_min !== row.reward_max)) return [];
  const isLike = (leaf) => (values.status === "" || leaf.status === values.status) && is(values.error, leaf.num_errors > 0) && is(values.graft, leaf.num_grafts > 0) && is(values.branch, leaf.num_branches > 0);
  return row.leaves.flatMap((leaf, n) => (isLike(leaf) ? [n] : []));
}

const STATUS = { completed: "completed", truncated: "truncated", format_violation: "violation", failed: "failed" };

// One mark per leaf, up or down from a line at zero, on one scale for all rows; colour by correctness or status; those that match are full.
function strips(rows) {
  const low = Math.min(0, ...rows.map((row) => row.reward_min ?? 0));
  const high = Math.max(1, ...rows.map((row) => row.reward_max ?? 1));
  const unit = 20 / (high - low);
  const zero = 1 + unit * high;
  return (row) => {
    const made = h("span", { class: "strip", title: "one mark per leaf, up or down from 0 by its reward; faint: does not match the filter" }, row.leaves.map((leaf, n) => {
      const mark = h("i", { class: [leaf.status, leaf.is_correct ? "right" : leaf.is_correct === false ? "wrong" : "", row.matches.includes(n) ? "" : "off"].join(" ") });
      const height = Math.max(2, unit * Math.abs(leaf.reward ?? 0));
      mark.style.height = `${height}px`;
      mark.style.top = `${leaf.reward < 0 ? zero : zero - height}px`;
      return mark;
    }));
    made.style.setProperty("--zero", `${zero}px`);
    return made;
  };
}

const GROUP_COLUMNS = [
  { key: "n", label: "group", of: (row) => row.n, lead: true, keep: true, show: (row) => `group ${row.n}` },
  { key: "question", label: "question", of: (row) => row.question, text: true, keep: true, wide: true, show: (row) => h("span", { class: "foreign" }, flat(row.question, 300)) },
  { key: "category", label: "category", of: (row) => row.category, text: true, show: (row) => plain(row.category) },
  { key: "strip", label: "leaves", of: (row) => row.num_correct / Math.max(1, row.num_leaves), keep: true, show: null },
  { key: "reward", label: "reward", of: (row) => row.reward_mean, keep: true },
  { key: "max", label: "best", of: (row) => row.reward_max },
  { key: "spread", label: "spread", title: "highest less lowest reward; 0: nothing to learn", of: (row) => (row.reward_max === null ? null : row.reward_max - row.reward_min) },
  { key: "correct", label: "correct", of: (row) => row.num_correct, same: (row) => [row.num_correct, row.num_leaves], show: (row) => `${row.num_correct}/${row.num_leaves}` },
  { key: "longest", label: "longest", title: "tokens of the longest path", of: (row) => row.longest },
  { key: "branches", label: "branches", of: (row) => row.num_branches },
  { key: "grafts", label: "grafts", of: (row) => row.num_grafts },
  { key: "errors", label: "tool errors", of: (row) => row.num_errors },
  { key: "status", label: "ended", of: (row) => row.statuses.completed ?? 0, same: (row) => row.statuses, text: true, show: (row) => Object.entries(row.statuses).map(([name, count]) => h("span", { class: `status ${name}` }, `${count} ${STATUS[name]} `)) },
];

// In a list of single leaves, as evaluations have, best and spread repeat the reward.
const groupColumns = (rows) => {
  const isSingle = rows.every((row) => row.num_leaves <= 1);
  return GROUP_COLUMNS.filter((one) => !isSingle || !["max", "spread"].includes(one.key)).map((one) => (one.key === "strip" ? { ...one, show: strips(rows) } : one));
};

const treeAddress = (run) => (row) => to.tree(run, row.file, row.n, row.matches && row.matches.length < row.num_leaves ? { leaf: row.matches[0] } : {});

export async function groups(page, { run, query }, file) {
  const found = h("div");
  const count = h("span", { class: "dim", id: "count" });
  const drawList = makeList(found, { id: "groups", columns: groupColumns, query, first: "n", address: treeAddress(run), empty: () => "No tree is like that." });
  const all = await get(runPath(run, "/groups"), { file });
  const draw = (values, isNew = true) => {
    const rows = all.map((row) => ({ ...row, matches: matches(row, values) })).filter((row) => row.matches.length);
    count.textContent = plural(rows.length, "tree");
    drawList(rows, isNew);
  };
  const chosen = filters(query, draw);
  const one = await get(runPath(run));
  const same = one.files.filter((f) => (f.kind === "update") === file.startsWith("update"));
  const at = same.findIndex((f) => f.name === file);
  const step = (by) => { const next = same[at + by]; if (at >= 0 && next) location.hash = to.groups(run, next.name, { ...here().query, page: "" }); };
  replace(page,
    h("div", { class: "title" }, h("h1", null, fileTitle(file)), h("button", { disabled: at <= 0, onclick: () => step(-1), title: "key [" }, "‹ before"), h("button", { disabled: at + 1 >= same.length, onclick: () => step(1), title: "key ]" }, "next ›"), count),
    chosen.element, found);
  draw(chosen.values, false);
  return { title: fileTitle(file), close: chosen.cancel, keys: [["[", "update before", () => step(-1)], ["]", "next update", () => step(1)]] };
}
