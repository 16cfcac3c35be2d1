// A path to read: the author and the cause of each step, then its content; markup is folded away.

import { author, causeWords, icon, refusalWords, STATUS_WORDS, WORDS } from "./marks.js";
import { h, num, plain, plural, score, signed } from "./dom.js";
import { retrievalFactor } from "./summary.js";

const part = (name, label, text, ...marks) => h("div", { class: `part ${name}` }, h("span", { class: "label" }, label, marks), h("pre", { class: "foreign" }, plain(text)));

function contentParts(content) {
  const found = [];
  if (content.thought.trim()) found.push(part("thought", "thought", content.thought.trim()));
  content.calls.forEach((call, n) => {
    found.push(part("call", plain(call.name), call.body.trim()));
    const seen = content.observations[n];
    if (!seen) return;
    const marks = [seen.is_error && "error", seen.is_truncated && "cut"].filter(Boolean).map((mark) => h("em", { class: mark === "error" ? "bad" : null }, ` ${mark}`));
    found.push(part(seen.is_error ? "result error" : "result", "result", seen.text, marks));
  });
  if (content.answer !== null && content.answer !== undefined) found.push(part("answer", "answer", content.answer));
  return found;
}

// A fact whose word is explained under the pointer.
const explained = (words, title) => h("span", { class: "explained", title }, words);

function stepFacts(step, leaf, numBelow) {
  const facts = [plural(step.num_tokens, "token")];
  if (step.entropy_mean !== null) facts.push(explained(`entropy ${num(step.entropy_mean)} (largest ${num(step.entropy_max)})`, WORDS.nats));
  if (step.num_loss) {
    const advantage = step.is_hard ? step.advantage : leaf?.advantage;
    const isShared = numBelow > 1 && !step.is_hard && leaf && step.advantage !== null;
    const shared = isShared ? ` on this path, ${score(step.advantage, true)} in the mean of the ${numBelow} leaves below` : "";
    facts.push(`${step.num_loss} with loss${advantage === null || advantage === undefined ? "" : `, advantage ${score(advantage, true)}${shared}`}`);
  } else if (step.cause) facts.push("no loss");
  if (step.ratio_mean !== null && step.is_learned) facts.push(explained(`ratio ${num(step.ratio_min, 5)} to ${num(step.ratio_max, 5)}`, WORDS.ratio));
  if (step.num_lesson) facts.push(`${step.num_lesson} that learning from grafts would imitate`);
  return facts.flatMap((fact, n) => (n ? [" · ", fact] : [fact]));
}

const isBelow = (leaf, step) => leaf.step_id === step.id || leaf.step_id.startsWith(`${step.id}.`);

// Rewards of the leaves below a step, and of the other leaves of the group.
function belowWords(step, tree) {
  const scored = tree.leaves.filter((leaf) => leaf.reward !== null);
  const [below, others] = [scored.filter((leaf) => isBelow(leaf, step)), scored.filter((leaf) => !isBelow(leaf, step))];
  const mean = (leaves) => score(leaves.reduce((sum, leaf) => sum + leaf.reward, 0) / leaves.length);
  if (!below.length || !others.length) return null;
  return `Mean reward: ${mean(below)} over ${plural(below.length, "leaf", "leaves")} below it, ${mean(others)} over the ${others.length} others of the group.`;
}

// What changed with a graft: the policy's entropy, and the rewards below it.
function graftWords(step, tree, effect) {
  const found = [];
  if (step.cause.task_id === tree.task.id) found.push("The retrieved trajectory answered this very question.");
  if (effect) found.push(`The policy's mean entropy: ${num(effect[0])} in its step before, ${num(effect[1])} in its step after (${signed(effect[1] - effect[0])}).`);
  const below = belowWords(step, tree);
  return below ? [...found, below] : found;
}

export function stepCard(step, { tree, leaf, onPick, selected, raw }) {
  const kind = step.cause?.kind ?? "prompt";
  const name = kind === "prompt" ? "prompt" : step.id;
  const effect = leaf?.effects?.[step.id];
  const notes = kind === "graft" ? graftWords(step, tree, effect).map((text) => h("p", null, text)) : [];
  const body = kind === "prompt" ? [part("thought", "question", step.content.thought)] : contentParts(step.content);
  if (step.violation) body.push(part("violation", "broke the format", step.violation));
  if (step.wrote !== undefined && kind !== "prompt") body.push(part("wrote", "wrote, to the letter", step.wrote));
  const written = h("details", { class: "raw", ontoggle: (event) => event.target.open && raw(event.target) }, h("summary", null, "as written, with markup"), h("pre", { class: "foreign" }));
  // What was said comes first, then why the step is there, then its numbers.
  const why = [
    kind !== "prompt" && kind !== "continuation" && kind !== "start" && h("p", { class: `cause ${kind}` }, `Here because it is ${causeWords(step)}.`),
    refusalWords(step) && h("p", { class: "cause refused" }, refusalWords(step)), notes];
  return h("article", { class: `step ${kind} by-${step.origin}${selected ? " sel" : ""}`, "data-step": step.id },
    h("header", null,
      h("button", { class: "stepid", onclick: () => onPick(step.id), title: "select this step" }, name),
      h("span", { class: "who" }, h("i", { class: `dot by-${step.origin}` }), kind === "prompt" ? "the task" : `written by ${author(step)}`),
      (kind === "graft" || kind === "branch") && h("span", { class: `kind ${kind}` }, icon(kind), " ", kind)),
    body, h("div", { class: "why" }, why),
    h("p", { class: "facts" }, stepFacts(step, leaf, tree.leaves.filter((one) => isBelow(one, step)).length)), written);
}

// Eq. 10 of RAPO in words: retrieval rewards are compared within the group, so one leaf's graft shifts all.
function advantageWords(leaf, tree) {
  const factor = retrievalFactor(leaf);
  if (factor === null) return score(leaf.advantage, true);
  const scored = tree.leaves.filter((one) => one.advantage !== null);
  const mean = scored.reduce((sum, one) => sum + one.retrieval_reward, 0) / scored.length;
  return explained(`${score(leaf.advantage, true)} = ${score(leaf.outcome_advantage, true)} of the reward alone × ${num(factor, 4)}: its retrieval reward ${score(leaf.retrieval_reward, true)} is ${factor > 1 ? "above" : "below"} the group's mean, ${score(mean)}`, WORDS.retrieval);
}

export function leafFacts(leaf, { task, leaves }) {
  const rows = [];
  const expected = task.reference.length ? task.reference.map((one) => plain(one)).join(" or ") : null;
  rows.push(["ended", `${STATUS_WORDS[leaf.status]}${leaf.error ? `: ${plain(leaf.error)}` : ""}`]);
  rows.push(["answer", h("span", { class: "foreign" }, leaf.answer === null ? "none" : plain(leaf.answer), leaf.is_correct === null ? "" : leaf.is_correct ? " ✓ correct" : ` ✗ wrong${expected ? `, expected ${expected}` : ""}`)]);
  const parts = Object.entries(leaf.reward_parts).map(([name, value]) => `${name} ${score(value)}`).join(", ");
  rows.push(["reward", `${score(leaf.reward)}${parts ? ` = ${parts}` : ""}`]);
  // An evaluation has none.
  if (leaves.some((one) => one.advantage !== null)) rows.push(["advantage", [advantageWords(leaf, { leaves }), leaf.has_loss ? "" : "; no loss on this path"]]);
  const factor = leaf.shaping_factor;
  if (factor !== null && factor !== undefined && (factor !== 1 || leaf.num_grafts)) rows.push(["shaping", `ratios × ${num(factor, 5)} before clipping (retrieval importance shaping: 1 + weight × ${num(100 * leaf.retrieved_frac, 3)} % retrieved)`]);
  rows.push(["length", `${plural(leaf.num_tokens, "token")}, ${plural(leaf.num_steps, "step")}, ${plural(leaf.num_calls, "tool call")}${leaf.retrieved_frac ? `, ${num(100 * leaf.retrieved_frac)} % retrieved` : ""}`]);
  return h("dl", { class: "leaffacts" }, rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}
