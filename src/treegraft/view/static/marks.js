// What a step, a token and a leaf look like: one place for colours, words and overlays.

import { h, num, plain, signed } from "./dom.js";

export const ORIGINS = ["prompt", "policy", "tool", "retrieved", "forced"];
export const ORIGIN_WORDS = { prompt: "prompt", policy: "the policy", tool: "a tool", retrieved: "another agent (retrieved)", forced: "Treegraft (forced)" };

export const OVERLAYS = [
  { id: "none", key: "0", label: "none" },
  { id: "origin", key: "1", label: "origin" },
  { id: "entropy", key: "2", label: "entropy" },
  { id: "advantage", key: "3", label: "advantage" },
  { id: "ratio", key: "4", label: "log ratio" },
  { id: "loss", key: "5", label: "loss mask" },
];

export const PLAN = {
  none: "No colouring.",
  origin: "Who wrote each token.",
  entropy: "Entropy of the distribution that a token was drawn from, in nats. Only sampled tokens have one.",
  advantage: "Orange is pushed up, violet down, where there is loss. Node: mean over the leaves below it; token: this path.",
  ratio: "New over old probability, in the last optimiser step that saw the token: orange became likelier, violet less likely. Only steps that were learned from have one; the first optimiser step of an update sees ratio 1.",
  loss: "Tokens that carry loss. All others are context.",
};

const ramp = (value) => Math.max(0, Math.min(10, Math.round(value * 10)));

// A class for a value: s0..s10 for amounts, p0..p10 and m0..m10 for signs.
export function shade(overlay, one, scale) {
  if (overlay === "origin") return `o-${one.origin}`;
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
  if (overlay === "loss") return [chip("has-loss", "loss"), chip("no-loss", "no loss")];
  if (overlay === "entropy") return [chip("s0", "0"), chip("s5", num(scale.entropy / 2)), chip("s10", `${num(scale.entropy)} nats`)];
  if (overlay === "advantage" || overlay === "ratio") return [chip("m10", num(-scale[overlay])), chip("zero", "0"), chip("p10", signed(scale[overlay])), chip("nothing", overlay === "ratio" ? "not recorded" : "no loss")];
  return [];
}

// ---- leaves

export const STATUS_WORDS = { completed: "completed", truncated: "truncated", format_violation: "format violation", failed: "failed" };

export function leafChip(leaf) {
  const verdict = leaf.is_correct ? "✓" : leaf.is_correct === false ? "✗" : "·";
  return h("span", { class: `leafchip ${leaf.status} ${leaf.is_correct ? "right" : leaf.is_correct === false ? "wrong" : ""}` }, `${verdict} ${leaf.reward === null ? "no reward" : `reward ${num(leaf.reward)}`}`);
}

// ---- steps

// The comparison in numbers, the same for a branch that was opened and for one that was not.
export function comparison(seen, isBrief) {
  const { probability, bar } = seen;
  if (bar === null || bar === undefined) return `p ${short(probability, 2)}`;
  const sign = probability > bar ? ">" : "≤";
  // As many digits as show the difference that the sign claims.
  const digits = [2, 3, 4].find((one) => sign === "≤" || probability.toFixed(one) !== bar.toFixed(one)) ?? 4;
  const name = isBrief ? "" : seen.rule === "bernoulli" ? "coin " : "limit ";
  return `p ${short(probability, digits)}${isBrief ? sign : ` ${sign} `}${name}${short(bar, digits)}`;
}

const short = (value, digits) => value.toFixed(digits).replace(/^0\./, ".");

// The comparison that decided: p had to exceed a threshold or a random number.
function decided(seen, holds) {
  if (seen.bar === null || seen.bar === undefined) return `probability ${num(seen.probability, 4)}`;
  const bar = seen.rule === "bernoulli" ? "the coin" : "the threshold";
  return `probability ${num(seen.probability, 4)} ${holds ? "is above" : "is not above"} ${bar}, ${num(seen.bar, 4)}`;
}

// Why no branch was opened beside a step, or fewer than the rule wanted; null where nobody asked or all were opened.
export function refusalWords(step) {
  const decision = step.decision;
  if (!decision || decision.num_opened >= Math.max(1, decision.num_wanted)) return null;
  const change = `in its first tokens entropy changed by ${signed(decision.seen.entropy_change, 4)} against the start`;
  if (decision.num_wanted === 0) return `No branch beside it: ${change}, and ${decided(decision.seen, false)} (rule “${plain(decision.seen.rule)}”).`;
  return `${decision.num_opened} of ${decision.num_wanted} branches beside it: ${change} and ${decided(decision.seen, true)}, but the budget of leaves was spent.`;
}

export function causeWords(step) {
  const cause = step.cause;
  if (!cause) return "the prompt";
  if (cause.kind === "start") return "a start: a first-level rollout";
  if (cause.kind === "continuation") return "the ordinary next step of its parent";
  if (cause.kind === "branch") return `a branch: after the result above it the policy's entropy changed by ${signed(cause.entropy_change, 4)} against the start of the trajectory; ${decided(cause, true)} (rule “${plain(cause.rule)}”)`;
  return `a graft: retrieved from “${plain(cause.source)}”, written on ${plain(cause.task_id) || "an unnamed task"}; similarity ${num(cause.similarity, 4)}, its trajectory earned ${num(cause.reward)}${cause.num_cut ? `; ${cause.num_cut} tokens were cut from its left for want of room` : ""}`;
}

// `isBrief`: without the tool's name, where there is but one.
export function headline(step, isBrief = false) {
  const { content } = step;
  if (content.answer !== null && content.answer !== undefined) return `answer ${content.answer}`;
  if (content.calls.length) return content.calls.map((call) => (isBrief ? call.body.trim() : `${call.name} ${call.body}`)).join("; ");
  if (content.thought) return content.thought;
  return step.wrote ?? "";
}

export const author = (step) => (step.origin === "policy" ? `the policy, version ${step.policy_version}` : ORIGIN_WORDS[step.origin]);
