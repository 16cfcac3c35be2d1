// The Step-Trace Buffer: steps of other agents, found by text or by similarity, and their grafts.

import { fileTitle, get, here, note, runPath, to } from "./api.js";
import { flat, h, num, plain, plural, replace } from "./dom.js";
import { contentParts } from "./transcript.js";

const said = (trace) => (trace.text !== null ? [h("pre", { class: "foreign" }, plain(trace.text))] : contentParts(trace.content));

function row(run, trace) {
  return h("article", { class: "trace", "data-hash": trace.hash },
    h("header", null,
      h("a", { href: to.trace(run, trace.hash) }, `${plain(trace.source)} · step ${trace.position}`),
      trace.similarity !== undefined && h("b", { class: "similarity" }, `cosine ${num(trace.similarity, 4)}`),
      h("span", null, `reward ${num(trace.reward)}`), trace.terminal && h("span", { class: "dim" }, "holds the answer"), h("span", { class: "dim" }, plain(trace.task_id))),
    h("div", { class: "columns" }, h("div", null, h("small", null, "history (the key)"), h("pre", { class: "foreign" }, plain(trace.key))), h("div", null, h("small", null, "the step"), said(trace))));
}

export async function bufferPage(page, { run, query }) {
  const state = { q: query.q ?? "", near: query.near ?? "", source: query.source ?? "", task: query.task ?? "", order: query.order ?? "stored", offset: query.offset ?? "" };
  const head = h("div");
  const list = h("div", { id: "traces" });
  const pages = h("div", { class: "tools" });
  const text = h("textarea", { id: "buffer-q", rows: 2, placeholder: "words; or a history: the question, then a line for each step", "aria-label": "query", oninput: () => later() });
  text.value = state.q;
  const near = h("select", { id: "buffer-near", onchange: (event) => set({ near: event.target.value }) }, h("option", { value: "" }, "contains these words"), h("option", { value: "1" }, "nearest to this history"));
  near.value = state.near;
  const source = h("select", { "aria-label": "source", onchange: (event) => set({ source: event.target.value }) });
  const order = h("select", { "aria-label": "order", onchange: (event) => set({ order: event.target.value }) }, [["stored", "as stored"], ["reward", "by reward"], ["task", "by task"], ["source", "by source"], ["longest", "longest first"]].map(([value, label]) => h("option", { value }, label)));
  order.value = state.order;
  let timer = null;
  let turn = 0;
  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(() => set({ q: text.value }), 250);
  };
  const set = (changes) => {
    Object.assign(state, { offset: "" }, changes);
    note(state);
    return load();
  };
  async function load() {
    const mine = ++turn;
    let got;
    try {
      got = await get(runPath(run, "/buffer"), state);
    } catch (error) {
      if (mine === turn) replace(list, h("p", { class: "notice bad" }, error.message));
      return;
    }
    if (mine !== turn) return;
    const { stats } = got;
    if (!stats.is_there) {
      replace(page, h("h1", null, "Step-Trace Buffer"), h("p", { class: "notice" }, stats.why));
      return;
    }
    replace(head, h("p", { class: "findings" }, h("span", null, `${plural(stats.num_traces, "trace")} of ${plural(stats.num_tasks, "task")}, ${stats.num_terminal} with an answer`), stats.num_held < stats.num_traces && h("span", null, `${stats.num_held} of them in this copy`), h("span", null, `encoder ${plain(stats.encoder)}`), stats.sources.map((one) => h("span", null, `${plain(one.source)}: ${one.num}, mean reward ${num(one.reward)}`)), stats.num_evicted > 0 && h("span", null, `${stats.num_evicted} evicted`)));
    if (!source.options.length) {
      replace(source, h("option", { value: "" }, "all agents"), stats.sources.map((one) => h("option", { value: one.source }, plain(one.source))));
      source.value = state.source;
    }
    replace(list, got.rows.length ? got.rows.map((trace) => row(run, trace)) : h("p", { class: "notice" }, "No trace is like that."));
    const size = 50;
    const jump = (by) => set({ offset: Math.max(0, got.offset + by * size) || "" });
    replace(pages, h("span", { class: "dim", id: "count" }, got.total ? `${got.offset + 1} to ${got.offset + got.rows.length} of ${got.total}` : ""),
      got.offset > 0 && h("button", { onclick: () => jump(-1) }, "‹ before"), got.offset + got.rows.length < got.total && h("button", { onclick: () => jump(1) }, "next ›"));
  }
  replace(page, h("h1", null, "Step-Trace Buffer"), head, h("div", { class: "tools" }, text, near, source, order, state.task && h("button", { onclick: () => { note({ task: "" }); state.task = ""; load(); } }, `task ${flat(state.task, 40)} ×`)), pages, list);
  await load();
  return { title: "buffer", close: () => { clearTimeout(timer); turn++; }, keys: [] };
}

// The steps in order; of a pruned buffer with D, and the cut ones where they stood.
function wholeTrajectory(run, trace, hash) {
  const weighed = trace.pruning?.steps.length ? trace.pruning.steps : trace.steps.map(() => ({ gain: null, is_cut: false }));
  const kept = trace.steps.values();
  return weighed.map(({ gain, is_cut: isCut, value }) => {
    const weight = gain !== null && h("span", { title: "how much likelier the step makes the rest for the model that pruned" }, `D ${gain > 0 ? "+" : ""}${num(gain)} nats`);
    if (isCut) return h("article", { class: "step cut" }, h("header", null, h("b", null, gain === null ? "cut: a walk that came back to where it was" : "cut"), weight), contentParts(value));
    const step = kept.next().value;
    return step && h("article", { class: `step by-retrieved${step.hash === hash ? " sel" : ""}` }, h("header", null, h("a", { href: to.trace(run, step.hash) }, `step ${step.position}`), weight, step.terminal && h("span", { class: "dim" }, "holds the answer")), said(step));
  });
}

export async function tracePage(page, { run }, hash) {
  const trace = await get(runPath(run, `/buffer/${encodeURIComponent(hash)}`));
  const where = h("div", { id: "grafts" }, h("p", { class: "dim" }, "looking for its grafts …"));
  replace(page,
    h("h1", null, `A trace of ${plain(trace.source)}`),
    h("p", { class: "findings" }, h("span", null, `step ${trace.position} of its trajectory`), h("span", null, `its trajectory earned ${num(trace.reward)}`), h("span", null, h("a", { href: to.buffer(run, { task: trace.task_id }) }, plain(trace.task_id) || "no task")), trace.terminal && h("span", null, "holds the answer"), trace.is_evicted && h("span", { class: "warn" }, "evicted since"), h("span", null, h("a", { href: to.buffer(run, { q: trace.key, near: "1" }) }, "traces with a history like this"))),
    h("div", { class: "tracepage" },
      h("section", null, h("h2", null, "Its history and its step"), h("pre", { class: "foreign key" }, plain(trace.key)), h("article", { class: "step graft by-retrieved sel" }, said(trace)),
        h("h2", null, "The whole trajectory"), wholeTrajectory(run, trace, hash)),
      h("section", null, h("h2", null, "Where it was grafted"), where)));
  const shown = [];
  let [cursor, stopped, count] = ["", false, 0];
  (async () => {
    try {
      do {
        const got = await get(runPath(run, `/grafts/${encodeURIComponent(hash)}`), { cursor });
        if (stopped) return;
        shown.push(...got.grafts);
        cursor = got.cursor;
        count = shown.length;
        replace(where, h("p", { class: "dim" }, `${plural(count, "graft")}${cursor ? " so far" : ""}`), h("table", { class: "list" }, h("thead", null, h("tr", null, ["where", "question", "similarity", "leaves below", "mean reward"].map((name, n) => h("th", { class: n < 2 ? "text" : null }, name)))),
          h("tbody", null, shown.slice(0, 500).map((one) => h("tr", null, h("td", { class: "text" }, h("a", { href: to.tree(run, one.file, one.n, { step: one.step, leaf: one.leaves[0] }) }, `${fileTitle(one.file)}, group ${one.n}, step ${one.step}`)), h("td", { class: "text foreign" }, flat(one.question, 50)), h("td", { "data-label": "similarity" }, num(one.similarity, 4)), h("td", { "data-label": "leaves below" }, String(one.leaves.length)), h("td", { "data-label": "mean reward" }, num(mean(one.rewards))))))));
      } while (cursor && count < 500);
    } catch (error) {
      replace(where, h("p", { class: "notice bad" }, error.message));
    }
    where.dataset.ready = "yes";
  })();
  return { title: "trace", close: () => (stopped = true), keys: [] };
}

const mean = (rewards) => {
  const scored = rewards.filter((reward) => reward !== null);
  return scored.length ? scored.reduce((a, b) => a + b, 0) / scored.length : null;
};
