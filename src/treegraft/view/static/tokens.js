// The tokens of a path with their recorded columns, coloured by one of them. Long paths are laid out only where they are in sight.

import { hideTip, h, num, plain, showTip } from "./dom.js";
import { ORIGINS, shade } from "./marks.js";

const CHUNK = 256;
const SCORES = { entropy: "entropies", logprob: "sampling_logprobs", old: "old_logprobs", ratio: "ratios" };

function unroll(runs) {
  const values = [];
  for (const [value, count] of runs) for (let n = 0; n < count; n++) values.push(value);
  return values;
}

// One record per token of a path; isRight: whether its answer is, which colours what the policy wrote.
export function records(steps, isRight = null) {
  const found = [];
  let position = 0;
  for (const step of steps) {
    const origins = unroll(step.origins);
    const loss = unroll(step.loss_mask);
    let sampled = 0;
    step.token_ids.forEach((id, n) => {
      const one = { id, text: step.texts ? step.texts[n] : `#${id} `, origin: ORIGINS[origins[n]], loss: loss[n] === 1, step: step.id, position: position++, advantage: step.advantage, share: isRight && origins[n] === 1 ? 0.5 : 0 };
      const isSampled = origins[n] === 1;
      for (const [name, column] of Object.entries(SCORES)) one[name] = isSampled && step[column] ? step[column][sampled] : null;
      if (isSampled && step.credit_factors && step.advantage !== null) one.advantage = step.advantage * step.credit_factors[sampled];
      if (isSampled) sampled++;
      found.push(one);
    });
  }
  return found;
}

export function tokenRows(one) {
  const exact = (value) => (value === null || value === undefined ? "not recorded" : String(value));
  const rows = [[JSON.stringify(plain(one.text)), `id ${one.id}`], ["written by", one.origin], ["step", one.step], ["position", String(one.position)]];
  if (one.origin === "policy") {
    rows.push(["entropy, nats", exact(one.entropy)], ["log-probability, sampling", exact(one.logprob)], ["log-probability before learning", exact(one.old)]);
    rows.push(["ratio new / old", exact(one.ratio)], ["log ratio", one.ratio === null ? "not recorded" : String(Math.log(one.ratio))]);
  }
  rows.push(["loss", one.loss ? "yes" : "no"], ["advantage", one.loss ? exact(one.advantage) : "none: no loss"]);
  return rows;
}

export class TokenView {
  constructor(all, { scale, overlay, head }) {
    this.all = all;
    this.scale = scale;
    this.spans = [];
    this.element = h("div", { class: "tokenview" });
    let box = null;
    let chunk = null;
    let count = 0;
    let step = null;
    for (const [n, one] of all.entries()) {
      if (one.step !== step) {
        step = one.step;
        box = h("section", { class: "tokstep", "data-step": step }, head?.(step));
        this.element.append(box);
        chunk = null;
      }
      if (chunk === null || (count >= CHUNK && /\s$/.test(all[n - 1]?.text ?? " ")) || count >= 2 * CHUNK) {
        chunk = document.createElement("div");
        chunk.className = "chunk";
        box.append(chunk);
        count = 0;
      }
      const span = document.createElement("span");
      span.textContent = plain(one.text).replace(/\n/g, "⏎\n") || "\u200b";
      span.index = n;
      this.spans.push(span);
      chunk.append(span);
      count++;
    }
    this.element.addEventListener("mouseover", (event) => {
      const at = event.target.index;
      if (at === undefined) hideTip();
      else showTip(event, tokenRows(this.all[at]));
    });
    this.element.addEventListener("mouseleave", hideTip);
    this.paint(overlay);
  }

  paint(overlay) {
    this.spans.forEach((span, n) => {
      span.className = `tok ${shade(overlay, this.all[n], this.scale)}`;
    });
  }
}

export function scaleOf(tree) {
  const most = (values) => values.reduce((a, b) => (typeof b === "number" && b > a ? b : a), 0);
  const logs = tree.steps.flatMap((step) => [step.ratio_min, step.ratio_max]).filter((v) => typeof v === "number" && v > 0).map((v) => Math.abs(Math.log(v)));
  return {
    entropy: most(tree.steps.map((step) => step.entropy_max)) || 1,
    meanEntropy: most(tree.steps.map((step) => step.entropy_mean)) || 1,
    advantage: most([...tree.leaves.map((leaf) => Math.abs(leaf.advantage ?? 0)), ...tree.steps.map((step) => Math.abs(step.advantage ?? 0))]) || 1,
    ratio: most(logs) || 0.01,
  };
}
