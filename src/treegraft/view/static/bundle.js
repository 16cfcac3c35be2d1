// The answers of a bundle, which has no server: from the files beside the page, searched here.

import { fileTitle } from "./api.js";

export const isBundle = document.documentElement.dataset.bundle !== undefined;

const waiting = new Map();
const known = new Map();

// Each file of data is a script that calls this: a page opened from a folder may load nothing else.
if (isBundle) globalThis.treegraft = (key, text) => waiting.get(key)?.(JSON.parse(text));

const address = (key) => {
  if (!/^[a-z0-9/-]+$/.test(key)) throw new Error("There is no such page.");
  return `data/${key}.js`;
};
const policy = isBundle && globalThis.trustedTypes ? trustedTypes.createPolicy("bundle", { createScriptURL: (key) => address(key) }) : { createScriptURL: address };

function load(key, missing) {
  if (!known.has(key)) {
    known.set(key, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      waiting.set(key, resolve);
      script.onerror = () => reject(new Error(missing ?? "This copy is not complete: a file of it is missing."));
      script.src = policy.createScriptURL(key);
      script.onload = () => script.remove();
      document.head.append(script);
    }));
  }
  return known.get(key);
}

const checked = (answer) => {
  if (answer && typeof answer.error === "string" && Object.keys(answer).length === 1) throw new Error(answer.error);
  return answer;
};
const absent = (file) => `This copy does not hold the trees of ${fileTitle(file)}; its charts and metrics are complete.`;

// ---- searches, as view/query.py has them

const LIMITS = [["min_reward", "reward", 1], ["max_reward", "reward", -1], ["min_tokens", "num_tokens", 1], ["max_tokens", "num_tokens", -1]];
const FLAGS = [["error", "num_errors"], ["graft", "num_grafts"], ["branch", "num_branches"]];

const ofLeaf = (asked, leaf) =>
  (!asked.status || leaf.status === asked.status) &&
  LIMITS.every(([name, key, sign]) => asked[name] === undefined || (leaf[key] !== null && sign * leaf[key] >= sign * Number(asked[name]))) &&
  FLAGS.every(([name, key]) => asked[name] === undefined || leaf[key] > 0 === (asked[name] === "1"));

function matches(asked, group) {
  if (asked.mixed !== undefined && (group.reward_min !== group.reward_max) !== (asked.mixed === "1")) return [];
  return group.leaves.flatMap((leaf, n) => (ofLeaf(asked, leaf) ? [n] : []));
}

function* texts({ tree }) {
  yield tree.task.question;
  yield tree.task.id;
  for (const { content, violation } of tree.steps) {
    yield content.thought;
    for (const call of content.calls) yield call.body;
    for (const seen of content.observations) yield seen.text;
    yield content.answer ?? "";
    yield violation ?? "";
  }
  for (const leaf of tree.leaves) yield leaf.error ?? "";
}

function snippet(tree, words) {
  for (const one of texts(tree)) {
    const place = one.toLowerCase().indexOf(words);
    if (place >= 0) return (place > 60 ? "…" : "") + one.slice(Math.max(0, place - 60), place + words.length + 60);
  }
  return null;
}

async function groups(key, files, asked) {
  const kinds = asked.kinds ?? "update";
  const isWanted = (file) => (asked.file ? file.name === asked.file : kinds === "all" || (kinds === "update") === (file.kind === "update"));
  const wanted = files.filter(isWanted).reverse();
  if (asked.file && !wanted.length) throw new Error(absent(asked.file));
  const words = (asked.q ?? "").toLowerCase();
  const found = [];
  const damaged = [];
  for (const file of wanted) {
    const answer = await load(`${key}/${file.name}`);
    if (answer.error) {
      if (asked.file) checked(answer);
      damaged.push(answer.error);
      continue;
    }
    for (const group of answer.groups) {
      const leaves = matches(asked, group);
      if (!leaves.length) continue;
      const said = words ? snippet(await load(`${key}/${file.name}/${group.n}`), words) : null;
      if (!words || said !== null) found.push({ ...group, matches: leaves, ...(words ? { snippet: said } : {}) });
    }
  }
  return { groups: found, damaged, cursor: null, num_seen: wanted.length, num_files: wanted.length };
}

async function task(key, files, id) {
  const all = await Promise.all(files.map((file) => load(`${key}/${file.name}`)));
  return all.flatMap((answer) => (answer.groups ?? []).filter((group) => group.task_id === id));
}

// ---- the buffer

async function buffer(key, asked) {
  const held = await load(`${key}/buffer`);
  const { answer } = held;
  checked(answer);
  if (!held.rows) return answer;
  if (asked.near === "1" && asked.q) throw new Error("A search by similarity needs the encoder: treegraft view RUN. This copy finds words.");
  const words = (asked.q ?? "").toLowerCase();
  const text = (row) => `${row.key}\n${row.text ?? JSON.stringify(row.content)}`.toLowerCase();
  const rows = Object.values(held.rows).filter((row) => (!asked.source || row.source === asked.source) && (!asked.task || row.task_id === asked.task) && (!words || text(row).includes(words)));
  const by = { reward: (a, b) => b.reward - a.reward, task: (a, b) => (a.task_id < b.task_id ? -1 : a.task_id > b.task_id ? 1 : a.position - b.position), source: (a, b) => (a.source < b.source ? -1 : a.source > b.source ? 1 : 0), longest: (a, b) => text(b).length - text(a).length }[asked.order];
  if (by) rows.sort(by);
  const offset = Number(asked.offset ?? 0);
  return { ...answer, stats: { ...answer.stats, num_held: Object.keys(held.rows).length }, total: rows.length, offset, rows: rows.slice(offset, offset + 50) };
}

async function trace(key, hash) {
  const held = await load(`${key}/buffer`);
  const row = held.rows?.[hash];
  if (!row) throw new Error("This copy does not hold that trace.");
  return { is_evicted: false, ...row, steps: (held.members[hash] ?? [hash]).map((one) => held.rows[one]).filter(Boolean) };
}

// ---- what the pages ask

export async function fromFiles(path, asked) {
  const index = await load("index");
  const [kind, name, ...rest] = path.split("/").map(decodeURIComponent);
  if (kind !== "runs" || name === undefined) return index[path];
  const key = String(index.runs.findIndex((run) => run.name === name));
  const { run, metrics } = await load(`${key}/run`);
  const [what, file, n] = rest;
  if (what === undefined) return checked(run);
  if (what === "metrics") return { ...checked(metrics), ...(asked.first !== undefined ? { first: 0 } : {}) };
  if (what === "groups") return groups(key, checked(run).files, asked);
  if (what === "task") return task(key, checked(run).files, asked.id ?? "");
  if (what === "buffer") return file === undefined ? buffer(key, asked) : trace(key, file);
  if (what === "grafts") return { grafts: (await load(`${key}/buffer`)).grafts?.[file] ?? [], cursor: null };
  const held = await load(`${key}/${file}/${n}`, absent(file));
  if (what === "trees") return checked(held.tree);
  const leaf = Number(asked.leaf ?? 0);
  if (!held.leaves[leaf]) throw new Error(`There is no leaf ${leaf}.`);
  return { leaf, steps: held.leaves[leaf].map((one) => held.steps[one]) };
}

export const madeAt = async () => (await load("index")).made;
