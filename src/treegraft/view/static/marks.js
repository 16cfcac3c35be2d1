// What a step, a token and a leaf look like: one place for colours, words and overlays.

import { h, num, plain, plural, s, score } from "./dom.js";

export const ORIGINS = ["prompt", "policy", "tool", "retrieved", "forced", "context"];
export const ORIGIN_WORDS = { prompt: "prompt", policy: "the policy", tool: "a tool", retrieved: "another agent (retrieved)", forced: "Treegraft (forced)", context: "the template or the agent's program" };

export const OVERLAYS = [
  { id: "outcome", label: "outcome" },
  { id: "advantage", label: "advantage" },
  { id: "origin", label: "origin" },
  { id: "entropy", label: "entropy" },
  { id: "ratio", label: "log ratio" },
  { id: "loss", label: "loss mask" },
];

export const PLAN = {
  outcome: "The greener a step, the more of the leaves below it are right.",
  origin: "Who wrote each token.",
  entropy: "Entropy of the distribution that a token was drawn from, in nats. Only sampled tokens have one.",
  advantage: "Orange is made likelier, violet less likely, where there is loss. Step: mean over the leaves below it; token: this path.",
  ratio: "New over old probability, in the last optimiser step that saw the token: orange became likelier, violet less likely. Only steps that were learned from have one; the first optimiser step of an update sees ratio 1.",
  loss: "Tokens that carry loss. All others are context.",
};

// What the words of the numbers mean, as hover text.
export const WORDS = {
  nats: "Entropy in nats: 0 where one token is certain, 0.69 where two are equally likely.",
  ratio: "A token's probability after learning over that before it: 1 is unchanged.",
  retrieval: "Retrieval reward (RAPO): positive where the policy's entropy fell after the graft. Above the group's mean it enlarges the advantage, below it shrinks it.",
};

const ramp = (value) => Math.max(0, Math.min(10, Math.round(value * 10)));

// A class for a value: s0..s10 for amounts, p0..p10 and m0..m10 for signs, g1..g10 for shares of right leaves.
export function shade(overlay, one, scale) {
  if (overlay === "origin") return `o-${one.origin}`;
  if (overlay === "outcome") return one.share ? `g${Math.max(1, ramp(one.share))}` : "";
  if (overlay === "loss") return one.loss ? "has-loss" : "no-loss";
  if (overlay === "entropy") return one.entropy === null || one.entropy === undefined ? "nothing" : `s${ramp(one.entropy / (scale.entropy || 1))}`;
  if (overlay === "advantage") return one.advantage === null || one.advantage === undefined || one.loss === false ? "nothing" : sign(one.advantage, scale.advantage);
  if (overlay === "ratio") return one.ratio === null || one.ratio === undefined ? "nothing" : sign(Math.log(one.ratio), scale.ratio);
  return "";
}

const sign = (value, most) => (value === 0 ? "zero" : `${value > 0 ? "p" : "m"}${Math.max(1, ramp(Math.abs(value) / (most || 1)))}`);

export function scaleLegend(overlay, scale) {
  const chip = (name, text) => h("span", { class: `chip tok ${name}` }, text);
  if (overlay === "origin") return ORIGINS.map((name) => chip(`o-${name}`, name));
  if (overlay === "outcome") return [chip("g0", "none right"), chip("g5", "half"), chip("g10", "all right")];
  if (overlay === "loss") return [chip("has-loss", "loss"), chip("no-loss", "no loss")];
  if (overlay === "entropy") return [chip("s0", "0"), chip("s5", num(scale.entropy / 2)), chip("s10", `${num(scale.entropy)} nats`)];
  if (overlay === "advantage" || overlay === "ratio") return [chip("m10", score(-scale[overlay])), chip("zero", "0"), chip("p10", score(scale[overlay], true)), chip("nothing", overlay === "ratio" ? "not recorded" : "no loss")];
  return [];
}

// ---- icons

const ICONS = {
  branch: ["M3 11V1", "M3 8.5C3 5 9 6 9 1"],
  fork: ["M1 2.5H11", "M4.5 2.5V9.5H11"],
  graft: ["M6 .8L11.2 6 6 11.2.8 6Z"],
  refused: ["M6 2.6a3.4 3.4 0 1 0 .01 0Z", "M3.6 8.4 8.4 3.6"],
  budget: ["M6 4.6a1.4 1.4 0 1 0 .01 0Z"],
  error: ["M6 1 11.4 10.8H.6Z", "M6 4.4v3.2"],
};

export const icon = (name) => s("svg", { class: `icon ${name}`, viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" }, ICONS[name].map((d) => s("path", { d })));

// ---- leaves

export const STATUS_WORDS = { completed: "completed", truncated: "truncated", format_violation: "format violation", failed: "failed" };
const UNUSUAL = {
  truncated: { name: "truncated", glyph: "⋯", word: "truncated", short: "trunc." },
  format_violation: { name: "violation", glyph: "!", word: "violation", short: "viol." },
  failed: { name: "failed", glyph: "∅", word: "failed" },
};

// How a leaf ended: a name for its look, a glyph and a word (`short` where there is little room), so that nothing depends on colours.
export function outcome(leaf) {
  if (leaf.is_correct) return { name: "right", glyph: "✓", word: "right" };
  if (UNUSUAL[leaf.status]) return UNUSUAL[leaf.status];
  return leaf.is_correct === false ? { name: "wrong", glyph: "✗", word: "wrong" } : { name: "ended", glyph: "·", word: "ended" };
}

export function leafChip(leaf) {
  const { name, glyph, word } = outcome(leaf);
  return h("span", { class: `leafchip ${name}` }, `${glyph} ${word}`);
}

// ---- steps

// A probability as it fits into a mark.
export const brief = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value) >= 9.95 ? Math.round(Math.abs(value)) : Math.abs(value).toFixed(Math.abs(value) < 0.005 ? 3 : 2).replace(/^0\./, ".")}`;

// The comparison that decided: P had to exceed a threshold or a random number. Shown with as many digits as tell the two apart.
function decided(seen, holds) {
  const { probability, bar } = seen;
  if (bar === null || bar === undefined) return `so the rule “${plain(seen.rule)}” gave P = ${num(probability, 4)}`;
  const digits = [2, 3, 4].find((one) => probability.toFixed(one) !== bar.toFixed(one)) ?? 6;
  const limit = seen.rule === "bernoulli" ? `the random number ${bar.toFixed(digits)}` : `the threshold ${bar.toFixed(digits)}`;
  return `so P = ${probability.toFixed(digits)} is ${holds ? "above" : "not above"} ${limit}`;
}

const went = (change, size) => (Math.abs(change) < 5e-7 ? "did not change" : `${change > 0 ? "rose" : "fell"} by ${size}`);

// The visible cause: how entropy went against the start of the trajectory.
function changeWords(seen) {
  return `entropy ${went(seen.entropy_change, `${num(Math.abs(seen.entropy_change), 4)} in the rule's unit`)} against the start of the trajectory`;
}

// Whether a branch was considered beside a step and not, or not wholly, opened: "refused" by the rule, "budget" for want of leaves; or null.
export function refusal(step) {
  const decision = step.decision;
  if (!decision || decision.num_opened >= Math.max(1, decision.num_wanted)) return null;
  return decision.num_wanted === 0 ? "refused" : "budget";
}

export function refusalWords(step) {
  const why = refusal(step);
  if (!why) return null;
  const { seen, num_wanted, num_opened } = step.decision;
  if (why === "refused") return `No branch beside it: ${changeWords(seen)}, ${decided(seen, false)}.`;
  return `${num_opened} of ${plural(num_wanted, "branch", "branches")} beside it, for the group's budget of leaves was spent: ${changeWords(seen)}, ${decided(seen, true)}.`;
}

// A branch of Tree-GRPO, for which no entropies were compared.
export const isDrawn = (step) => step.cause?.kind === "branch" && step.cause.rule === "random";

export function causeWords(step) {
  const cause = step.cause;
  if (!cause) return "the prompt";
  if (cause.kind === "start") return "a start: a first-level rollout";
  if (cause.kind === "continuation") return "the ordinary next step of its parent";
  if (isDrawn(step)) return "a branch: a further child of a finished step, drawn at random";
  if (cause.kind === "branch") return `a branch: ${changeWords(cause)}, ${decided(cause, true)}`;
  if (cause.kind === "context") return `what later steps saw after the earlier ones or in their place: it continues ${step.parent === null ? "nothing" : step.parent === "0" ? "the prompt" : `step ${step.parent}`}, and its tokens carry no loss`;
  if (cause.kind === "stored") return `a stored step of “${plain(cause.source)}”, whose trajectory earned ${score(cause.reward)}; rollouts begin below it`;
  if (cause.kind === "restart") return `the beginning of a rollout below ${plural(cause.num_steps, "stored step")} (${plain(cause.rule)})`;
  if (cause.kind === "retry") return `a retry: begins with the thought of step ${cause.beside} and a forced opening (${plain(cause.rule)})`;
  return `a graft: retrieved from “${plain(cause.source)}”, written on ${plain(cause.task_id) || "an unnamed task"}; similarity ${num(cause.similarity, 4)}, its trajectory earned ${score(cause.reward)}${cause.num_cut ? `; ${cause.num_cut} tokens were cut from its left for want of room` : ""}`;
}

// The values of a call's arguments, or its text.
function argumentWords(body) {
  try {
    const parsed = JSON.parse(body);
    if (parsed !== null && typeof parsed === "object") return Object.values(parsed).map((one) => (typeof one === "string" ? one : JSON.stringify(one))).join(", ");
  } catch {
    // Not JSON: the text of a call in tags.
  }
  return body.trim();
}

// `isBrief`: without the tool's name, where there is but one.
export function headline(step, isBrief = false) {
  const { content } = step;
  if (content.answer !== null && content.answer !== undefined) return `answer ${content.answer}`;
  if (content.calls.length) return content.calls.map((call) => (isBrief ? argumentWords(call.body) : `${call.name} ${argumentWords(call.body)}`)).join("; ");
  if (content.thought) return content.thought;
  return step.wrote ?? "";
}

export const author = (step) => (step.origin === "policy" ? `the policy, version ${step.policy_version}` : ORIGIN_WORDS[step.origin]);
