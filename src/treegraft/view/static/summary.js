// What a tree shows, in sentences made from its data: what was right, what grafts and branches brought, where the advantage fell.

import { flat, plain, plural, score } from "./dom.js";
import { headline, isDrawn, WORDS } from "./marks.js";

const MOST_NAMED = 6;

// Leaf 3; leaves 3, 9; 12 leaves.
export function leafNames(numbers) {
  if (numbers.length === 1) return `leaf ${numbers[0]}`;
  return numbers.length > MOST_NAMED ? `${numbers.length} leaves` : `leaves ${numbers.join(", ")}`;
}

const where = (tree, holds) => [...tree.leaves.keys()].filter((n) => holds(tree.leaves[n]));
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
const change = (value) => score(value, true);
const shownFirst = (tree, numbers) => (numbers.includes(tree.best) ? tree.best : numbers[0]);
const isJudged = (tree) => tree.leaves.some((leaf) => leaf.is_correct !== null);

function outcomes(tree) {
  const all = tree.leaves.length;
  const right = where(tree, (leaf) => leaf.is_correct);
  if (!isJudged(tree)) return { kind: "plain", words: `${plural(all, "leaf", "leaves")}, none judged right or wrong` };
  if (!right.length) return { kind: "none", words: all === 1 ? "The only leaf is not right" : `None of ${all} right` };
  if (right.length === all) return { kind: "right", leaf: right[0], words: all === 1 ? "The only leaf is right" : `All ${all} right` };
  const others = where(tree, (leaf) => !leaf.is_correct);
  const which = right.length <= MOST_NAMED && right.length <= others.length ? `: ${leafNames(right)}` : others.length <= 3 ? `: all but ${leafNames(others)}` : "";
  return { kind: "right", leaf: shownFirst(tree, right), words: `${right.length} of ${all} right${which}` };
}

// Leaves that ended before they had an answer to judge.
function ends(tree) {
  const found = [["truncated", "truncated"], ["format_violation", "in violation of the format"], ["failed", "failed"]].map(([status, word]) => [word, where(tree, (leaf) => leaf.status === status)]).filter(([, numbers]) => numbers.length);
  if (!found.length) return null;
  const named = (numbers) => (numbers.length === tree.leaves.length ? "" : numbers.length > MOST_NAMED ? "" : `: ${leafNames(numbers)}`);
  return { kind: "ended", leaf: found[0][1][0], words: found.map(([word, numbers]) => `${numbers.length} ${word}${named(numbers)}`).join("; ") };
}

// How leaves fared: their right answers, or their mean reward where nothing was judged; null without one to count.
function fared(tree, leaves) {
  if (isJudged(tree)) return leaves.length ? { value: leaves.filter((leaf) => leaf.is_correct).length / leaves.length, words: `${leaves.filter((leaf) => leaf.is_correct).length} of ${leaves.length}` } : null;
  const rewards = leaves.map((leaf) => leaf.reward).filter((reward) => reward !== null);
  return rewards.length ? { value: mean(rewards), words: score(mean(rewards)) } : null;
}

// The leaves with something beside those without it.
function compared(tree, name) {
  const [own, others] = [(leaf) => leaf[name] > 0, (leaf) => !leaf[name]].map((has) => fared(tree, tree.leaves.filter(has)));
  if (own === null) return "";
  const [before, after] = isJudged(tree) ? ["", " right"] : ["mean reward ", ""];
  if (others === null) return `; no comparison: every leaf has one (${before}${own.words}${after})`;
  // Numbers alone: of a few leaves they are no effect.
  return `; ${before}${own.words}${after} with one, ${others.words} without`;
}

// Graft and branch at once: either may be what a difference comes from, so all four kinds of leaves are counted.
function crosstab(tree) {
  if (!["num_grafts", "num_branches"].every((name) => tree.leaves.some((leaf) => leaf[name]))) return null;
  const kinds = [["graft only", true, false], ["branch only", false, true], ["both", true, true], ["neither", false, false]];
  const found = kinds.map(([name, graft, branch]) => [name, fared(tree, tree.leaves.filter((leaf) => leaf.num_grafts > 0 === graft && leaf.num_branches > 0 === branch))]);
  return { kind: "plain", words: `${isJudged(tree) ? "Right" : "Mean reward"} by way: ${found.map(([name, one]) => `${name} ${one?.words ?? "no leaf"}`).join(", ")}` };
}

function grafts(tree) {
  const found = tree.steps.filter((step) => step.cause?.kind === "graft");
  if (!found.length) return null;
  const sources = [...new Set(found.map((step) => plain(step.cause.source)))];
  const isOneTool = new Set(tree.steps.flatMap((step) => step.content.calls.map((call) => call.name))).size === 1;
  const groups = [...Map.groupBy(found, (step) => flat(headline(step, isOneTool), 32))].sort((a, b) => b[1].length - a[1].length);
  const named = groups.slice(0, 2).map(([words, group]) => `${words}${group.length > 1 ? ` ×${group.length}` : ""}`);
  const different = groups.length > 1 ? ` (${groups.length === found.length ? "all different" : `${groups.length} different steps`})` : "";
  return { kind: "graft", leaf: shownFirst(tree, where(tree, (leaf) => leaf.num_grafts > 0)), words: `${plural(found.length, "graft")}${different}: ${named.join(", ")}${groups.length > 2 ? ", …" : ""} from ${sources.slice(0, 2).join(", ")}${sources.length > 2 ? ", …" : ""}${compared(tree, "num_grafts")}` };
}

// The way that entropy went at all of these changes.
function way(changes) {
  const [low, high] = [Math.min(...changes), Math.max(...changes)];
  if (low === 0 && high === 0) return "did not change";
  return low >= 0 ? "rose" : high <= 0 ? "fell" : "changed";
}

// What the rule asked for, where all branches say so.
function ruleWords(steps) {
  const bars = new Set(steps.map((step) => step.cause.bar ?? null));
  const rules = new Set(steps.map((step) => step.cause.rule));
  if (rules.size > 1 || bars.has(null)) return `rule ${[...rules].map((one) => `“${plain(one)}”`).join(", ")}`;
  return rules.has("bernoulli") ? "rule P > a random number" : bars.size === 1 ? `rule P > ${[...bars][0].toFixed(2)}` : `rule “${plain([...rules][0])}”`;
}

const spanned = (values) => [...new Set([Math.min(...values), Math.max(...values)].map(change))].join(" to ");

function retries(tree) {
  const found = tree.steps.filter((step) => step.cause?.kind === "retry");
  if (!found.length) return null;
  const answers = found.filter((step) => step.content.answer !== null && step.content.answer !== undefined).length;
  const parts = [answers && plural(answers, "answer"), found.length > answers && plural(found.length - answers, "call")].filter(Boolean);
  return { kind: "branch", words: `${parts.join(" and ")} begun by a forced opening where rollouts had failed` };
}

function branches(tree) {
  const found = tree.steps.filter((step) => step.cause?.kind === "branch");
  if (!found.length && retries(tree)) return null;
  const looked = tree.steps.filter((step) => step.decision);
  const spent = looked.filter((step) => step.decision.num_opened < step.decision.num_wanted).length;
  if (!found.length && looked.length) return { kind: "plain", words: `No branch: considered ${looked.length === 1 ? "once" : `${looked.length} times`}${spent ? `, ${spent} without budget` : ""}` };
  if (!found.length) return tree.leaves.length > 1 ? { kind: "plain", words: `No branch${tree.steps.some(isTwin(tree)) ? ": forks are rollouts that began alike" : ""}` } : null;
  const measured = found.filter((step) => !isDrawn(step));
  const changes = measured.map((step) => step.cause.entropy_change);
  const drawn = measured.length < found.length ? `${measured.length ? `; ${found.length - measured.length} of them` : ""} below finished steps, drawn at random` : "";
  const entropies = measured.length ? ` where entropy ${way(changes)} (${spanned(changes)} in the rule's unit; ${ruleWords(measured)})` : "";
  const why = `${entropies}${drawn}`;
  const refused = spent ? `; ${spent} more found no budget` : "";
  return { kind: "branch", leaf: shownFirst(tree, where(tree, (leaf) => leaf.num_branches > 0)), words: `${plural(found.length, "branch", "branches")}${why}${compared(tree, "num_branches")}`, title: measured.length ? `${plural(looked.length, "step")} considered${refused}.` : "" };
}

// Whether a step has the tokens of another child of its parent, each of them no branch: rollouts that began alike.
export function isTwin(tree) {
  const key = (step) => `${step.depth} ${step.content_number}`;
  const counts = new Map();
  for (const step of tree.steps) if (step.cause?.kind === "start") counts.set(key(step), (counts.get(key(step)) ?? 0) + 1);
  return (step) => step.cause?.kind === "start" && counts.get(key(step)) > 1;
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
  if (scored.length && scored.every((n) => value(n) === 0)) return { kind: "plain", words: rewards.length === 1 && tree.leaves.length > 1 ? `Every reward is ${score(rewards[0])}: no advantage, so nothing is learned here` : "No advantage, so nothing is learned here" };
  if (!scored.length) return null;
  const at = (most) => scored.filter((n) => Math.abs(value(n) - most) < 1e-9);
  const [high, low] = [Math.max(...scored.map(value)), Math.min(...scored.map(value))];
  const said = (most) => {
    const leaf = tree.leaves[at(most)[0]];
    const factor = most < 0 ? retrievalFactor(leaf) : null;
    const why = factor !== null && factor > 1 && leaf.retrieval_reward ? ` (× ${score(factor)} for its retrieval reward ${change(leaf.retrieval_reward)})` : "";
    return { words: `${change(most)} on ${leafNames(at(most))}${why}`, title: why ? WORDS.retrieval : "" };
  };
  const parts = high === low ? [said(high)] : [said(high), said(low)];
  return { kind: "advantage", leaf: shownFirst(tree, at(high)), words: `Advantage ${parts.map((one) => one.words).join("; lowest ")}`, title: parts.map((one) => one.title).find(Boolean) };
}

// Sentences on a tree: {kind, words, leaf?, title?}; `leaf` is one that shows it.
export const summary = (tree) => (tree.leaves.length ? [outcomes(tree), ends(tree), grafts(tree), retries(tree), branches(tree), crosstab(tree), advantages(tree)].filter(Boolean) : [{ kind: "plain", words: "This tree has no leaf." }]);

// What the leaf with the highest reward is called; null where all earned the same.
export function bestName(tree) {
  if (tree.best === null) return null;
  const rewards = new Set(tree.leaves.map((leaf) => leaf.reward).filter((reward) => reward !== null));
  if (rewards.size < 2) return null;
  return tree.leaves[tree.best].is_correct ? "best" : "highest reward";
}
