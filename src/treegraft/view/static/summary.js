// What a tree shows, in sentences made from its data: what was right, what grafts and branches brought, where the advantage fell.

import { num, plain, plural, signed } from "./dom.js";

const MOST_NAMED = 6;

// Leaf 3; leaves 3 and 9; 12 leaves.
export function leafNames(numbers) {
  if (numbers.length === 1) return `leaf ${numbers[0]}`;
  if (numbers.length > MOST_NAMED) return `${numbers.length} leaves`;
  return `leaves ${numbers.slice(0, -1).join(", ")} and ${numbers.at(-1)}`;
}

const where = (tree, holds) => [...tree.leaves.keys()].filter((n) => holds(tree.leaves[n]));
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
const minus = (text) => text.replace(/^-/, "−");

function outcomes(tree) {
  const { leaves } = tree;
  const right = where(tree, (leaf) => leaf.is_correct);
  const judged = where(tree, (leaf) => leaf.is_correct !== null);
  const count = (status, word) => { const found = where(tree, (leaf) => leaf.status === status).length; return found ? `, ${found} ${word}` : ""; };
  const ends = count("truncated", "truncated") + count("format_violation", "in violation of the format") + count("failed", "failed");
  if (!judged.length) return { kind: "plain", words: `${plural(leaves.length, "leaf", "leaves")}, none judged right or wrong${ends}` };
  const all = plural(leaves.length, "leaf", "leaves");
  if (!right.length) return { kind: "none", words: leaves.length === 1 ? `The only leaf is not right${ends}` : `None of ${all} is right${ends}` };
  if (right.length === leaves.length) return { kind: "right", leaf: right[0], words: leaves.length === 1 ? "The only leaf is right" : `All ${all} are right` };
  const others = where(tree, (leaf) => !leaf.is_correct);
  const which = right.length <= MOST_NAMED && right.length <= others.length ? `: ${leafNames(right).replace(/^(leaf|leaves) /, "")}` : others.length <= 3 ? `, all but ${leafNames(others)}` : "";
  return { kind: "right", leaf: right[0], words: `${right.length} of ${all} right${which}${ends}` };
}

// How the leaves with something fared beside those without it: by right answers, or by reward where nothing was judged.
function compared(tree, name) {
  const groups = [(leaf) => leaf[name] > 0, (leaf) => !(leaf[name] > 0)].map((has) => tree.leaves.filter((leaf) => has(leaf)));
  const isJudged = tree.leaves.some((leaf) => leaf.is_correct !== null);
  const [own, others] = groups.map((leaves) => {
    if (isJudged) return leaves.length ? `${leaves.filter((leaf) => leaf.is_correct).length} of ${leaves.length}` : null;
    const rewards = leaves.map((leaf) => leaf.reward).filter((reward) => reward !== null);
    return rewards.length ? minus(num(mean(rewards))) : null;
  });
  const what = isJudged ? "right" : "mean reward";
  if (own === null) return "";
  return others === null ? `: ${what} ${own}, no leaf without one` : `: ${what} ${own} with one, ${others} without`;
}

function grafts(tree) {
  const found = tree.steps.filter((step) => step.cause?.kind === "graft");
  if (!found.length) return null;
  const sources = [...new Set(found.map((step) => plain(step.cause.source)))];
  return { kind: "graft", leaf: where(tree, (leaf) => leaf.num_grafts > 0)[0], words: `${plural(found.length, "graft")} from ${sources.slice(0, 2).join(", ")}${sources.length > 2 ? ", …" : ""}${compared(tree, "num_grafts")}` };
}

function branches(tree) {
  const found = tree.steps.filter((step) => step.cause?.kind === "branch");
  const looked = tree.steps.filter((step) => step.decision);
  const spent = looked.filter((step) => step.decision.num_opened < step.decision.num_wanted).length;
  if (!found.length && !looked.length) return null;
  if (!found.length) return { kind: "plain", words: `No branch; considered ${plural(looked.length, "time")}${spent ? `, ${spent} without budget` : ""}` };
  const changes = found.map((step) => step.entropy_change).filter(Boolean);
  const tools = [...new Set(changes.map((one) => one.after_tool).filter(Boolean))];
  let why = "";
  if (changes.length) {
    const [low, high] = [Math.min(...changes.map((one) => one.change)), Math.max(...changes.map((one) => one.change))];
    const span = num(low, 2) === num(high, 2) ? minus(signed(high, 2)) : `${minus(signed(low, 2))} to ${minus(signed(high, 2))}`;
    why = `${tools.length ? ` after ${tools.slice(0, 2).map((one) => plain(one)).join(" or ")}` : ""} where entropy ${low > 0 ? "rose by" : "changed by"} ${low > 0 ? span.replaceAll("+", "") : span} nats a token`;
  }
  const refused = spent ? `; ${spent} more found no budget` : "";
  return { kind: "branch", leaf: where(tree, (leaf) => leaf.num_branches > 0)[0], words: `${plural(found.length, "branch", "branches")}${why}${compared(tree, "num_branches")}`, title: `${plural(looked.length, "step")} considered${refused}` };
}

// The factor that the retrieval reward puts on a leaf's advantage (RAPO, eq. 10); null without one.
export function retrievalFactor(leaf) {
  const own = leaf.outcome_advantage;
  if (leaf.advantage === null || !own || Math.abs(own - leaf.advantage) <= 1e-9) return null;
  return leaf.advantage / own;
}

function advantages(tree) {
  const scored = where(tree, (leaf) => leaf.advantage !== null && leaf.has_loss);
  const rewards = [...new Set(tree.leaves.map((leaf) => leaf.reward).filter((reward) => reward !== null))];
  const value = (n) => tree.leaves[n].advantage;
  if (scored.length && scored.every((n) => value(n) === 0)) return { kind: "plain", words: rewards.length === 1 && tree.leaves.length > 1 ? `Every reward is ${minus(num(rewards[0]))}: no advantage, so nothing is learned here` : "No advantage, so nothing is learned here" };
  if (!scored.length) return null;
  const at = (most) => scored.filter((n) => Math.abs(value(n) - most) < 1e-9);
  const [high, low] = [Math.max(...scored.map(value)), Math.min(...scored.map(value))];
  const said = (most) => {
    const factor = most < 0 ? retrievalFactor(tree.leaves[at(most)[0]]) : null;
    const why = factor !== null && factor > 1 && tree.leaves[at(most)[0]].retrieval_reward ? ` (× ${num(factor)} for its retrieval reward ${minus(signed(tree.leaves[at(most)[0]].retrieval_reward))})` : "";
    return `${minus(signed(most))} on ${leafNames(at(most))}${why}`;
  };
  const parts = high === low ? said(high) : `${said(high)}; lowest ${said(low)}`;
  return { kind: "advantage", leaf: at(high)[0], words: `Advantage ${parts}` };
}

// Sentences on a tree: {kind, words, leaf?, title?}; `leaf` is one that shows it.
export const summary = (tree) => (tree.leaves.length ? [outcomes(tree), grafts(tree), branches(tree), advantages(tree)].filter(Boolean) : [{ kind: "plain", words: "This tree has no leaf." }]);

// What the leaf with the highest reward is called; null where all earned the same.
export function bestName(tree) {
  if (tree.best === null) return null;
  const rewards = new Set(tree.leaves.map((leaf) => leaf.reward).filter((reward) => reward !== null));
  if (rewards.size < 2) return null;
  return tree.leaves[tree.best].is_correct ? "best" : "highest reward";
}
