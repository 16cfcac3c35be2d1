"""The rules of the warnings while training, each with its meaning and advice.
`treegraft.runs.health` applies them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

MetricsLine = Mapping[str, Any]
Findings = Mapping[str, float]
"""The findings of a rule: a number by subject, such as a tool's name; "" for the whole run."""


@dataclass(slots=True)
class History:
    """The part of earlier lines that rules compare with: bounded, and a function of the lines."""

    window: int
    first_entropy: float | None = None
    tools: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Calls, failed calls and updates with a call, by tool, before the latest line."""
    recent: deque[MetricsLine] = field(default_factory=deque)
    """The lines of the latest updates that sampled, at most `window`, the latest one included."""

    def begin(self, line: MetricsLine) -> None:
        """Takes in the line before the rules look at it."""
        if self.first_entropy is None:
            self.first_entropy = number(line, "learn/entropy")
        if "rollout/num_trajectories" in line:
            self.recent.append(line)
            while len(self.recent) > self.window:
                self.recent.popleft()

    def end(self, line: MetricsLine) -> None:
        """Takes in the parts with which only later lines are compared."""
        for name, (calls, share) in tools_of(line).items():
            before = self.tools.get(name, (0.0, 0.0, 0))
            self.tools[name] = (before[0] + calls, before[1] + calls * share, before[2] + 1)

    def mean(self, key: str) -> float | None:
        """Returns the mean of a metric over the window; None where it is not full, or one of its
        lines has no such number."""
        values = [number(line, key) for line in self.recent]
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if len(known) == self.window else None


def number(line: MetricsLine, key: str) -> float | None:
    """Returns a finite metric of a line, None where there is none."""
    value = line.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def tools_of(line: MetricsLine) -> dict[str, tuple[float, float]]:
    """Returns calls and share of failed ones by tool, of tools that were called."""
    start, end = "tools/", "_failure_frac"
    names = [
        key[len(start) : -len(end)] for key in line if key.startswith(start) and key.endswith(end)
    ]
    found = {}
    for name in names:
        share, calls = number(line, f"{start}{name}{end}"), number(line, f"{start}{name}_calls")
        if share is not None and calls is not None:
            found[name] = (calls, share)
    return found


# ---------------------------------------------------------------------- conditions

Check = Callable[[History, MetricsLine, float], Findings]


def _whole(value: float | None, is_wrong: Callable[[float], bool]) -> Findings:
    return {"": value} if value is not None and is_wrong(value) else {}


def _from(key: str) -> Check:
    """The latest value is at the limit or above."""
    return lambda history, line, limit: _whole(number(line, key), lambda value: value >= limit)


def _mean_from(key: str) -> Check:
    """The mean of the window is at the limit or above."""

    def check(history: History, line: MetricsLine, limit: float) -> Findings:
        return _whole(history.mean(key) if key in line else None, lambda value: value >= limit)

    return check


def _no_tool_calls(history: History, line: MetricsLine, limit: float) -> Findings:
    has_tools = any(key.startswith("tools/") and key.endswith("_calls") for key in line)
    return _whole(
        history.mean("rollout/tool_calls_mean") if has_tools else None, lambda value: value <= limit
    )


def _entropy_collapse(history: History, line: MetricsLine, limit: float) -> Findings:
    now, first = number(line, "learn/entropy"), history.first_entropy
    # A group that is skipped has no entropy: 0 would be the absence of a measurement.
    if now is None or not first or number(line, "learn/num_contributions") == 0:
        return {}
    return _whole(now / first, lambda value: value <= limit)


def _movement(line: MetricsLine) -> float | None:
    """The learning rate, 0 without a gradient; None where no group had variance, which is another
    warning.

    Adam divides by the size of the gradient, so the rate tells how far the weights moved. KL(old ||
    new) does not: it is measured before the last optimiser step, and is 0 where the groups of the
    earlier steps had no variance.
    """
    if (number(line, "learn/skipped_groups_frac") or 0.0) >= 1.0:
        return None
    norm, rate = number(line, "learn/grad_norm"), number(line, "learn/lr")
    return None if norm is None or rate is None else (rate if norm > 0 else 0.0)


def _policy_still(history: History, line: MetricsLine, limit: float) -> Findings:
    moved = [_movement(one) for one in history.recent]
    known = [value for value in moved if value is not None]
    is_full = len(known) == history.window and "learn/grad_norm" in line
    return _whole(max(known) if is_full else None, lambda value: value <= limit)


def _failed(history: History, line: MetricsLine, limit: float) -> Findings:
    shares = {"": number(line, "rollout/failed_frac"), "eval": number(line, "eval/failed_frac")}
    return {
        subject: share for subject, share in shares.items() if share is not None and share > limit
    }


def _engine_drift(history: History, line: MetricsLine, limit: float) -> Findings:
    gap, allowed = number(line, "learn/engine_gap"), number(line, "learn/engine_gap_limit")
    return _whole(gap, lambda value: allowed is not None and value > limit * allowed)


def _one_sign(history: History, line: MetricsLine, limit: float) -> Findings:
    return _whole(
        number(line, "learn/positive_frac"), lambda value: max(value, 1.0 - value) >= limit
    )


def _tool_failing(history: History, line: MetricsLine, limit: float) -> Findings:
    found = {}
    for name, (calls, share) in tools_of(line).items():
        before_calls, before_failures, num_updates = history.tools.get(name, (0.0, 0.0, 0))
        if num_updates < history.window:
            continue
        usual = before_failures / before_calls
        # Of the usual share, never quite 0 or 1: a rare failure must not look impossible.
        likely = min(max(usual, 1.0 / (before_calls + 2.0)), 1.0 - 1.0 / (before_calls + 2.0))
        error = math.sqrt(likely * (1.0 - likely) / calls)
        if share - usual >= limit and share - usual > 3.0 * error:
            found[name] = share
    return found


def _tool_broken(history: History, line: MetricsLine, limit: float) -> Findings:
    return {name: share for name, (_, share) in tools_of(line).items() if share >= limit}


def _not_finite(history: History, line: MetricsLine, limit: float) -> Findings:
    count = sum(isinstance(value, float) and not math.isfinite(value) for value in line.values())
    return _whole(float(count), lambda value: value > limit)


# ---------------------------------------------------------------------- the rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One warning: its condition and its texts."""

    name: str
    """As in [health] and in `health/NAME`."""
    check: Check
    says: str
    """The finding, a format string over {value} and {subject}."""
    meaning: str
    causes: tuple[str, ...]
    advice: str


RULES: tuple[Rule, ...] = (
    Rule(
        name="no_tool_calls",
        check=_no_tool_calls,
        says="tools are not called: {value:.2g} calls a trajectory",
        meaning="The agent answers without calling tools, so it cannot learn to use them.",
        causes=(
            "the model does not know the call's markup",
            "an immediate answer has the same reward",
            "the prompt does not list the tools",
        ),
        advice=(
            "Read a trajectory. Warm up on traces with calls (warmup.num_steps), check"
            " format.system_prompt, or choose tasks that need a tool."
        ),
    ),
    Rule(
        name="no_variance",
        check=_from("learn/skipped_groups_frac"),
        says="groups without variance of reward: {value:.0%}",
        meaning=(
            "All trajectories of a task have the same reward, so their advantages are 0 and the"
            " update learns nothing from them."
        ),
        causes=(
            "all tasks are too hard or too easy",
            "a reward that does not distinguish answers",
            "too few leaves",
            "temperature too low",
        ),
        advice=(
            "Check reward/mean: near its maximum choose harder tasks, near its minimum easier ones"
            " or a warm-up; raise explore.num_leaves or rollout.temperature."
        ),
    ),
    Rule(
        name="entropy_collapse",
        check=_entropy_collapse,
        says="entropy fell to {value:.1%} of the first update's",
        meaning=(
            "The policy is almost certain of every token: the trajectories of a group become"
            " identical and exploration ends."
        ),
        causes=(
            "learning rate too high",
            "upper clipping limit too low (loss.clip_high)",
            "the same answer pattern is rewarded in all tasks",
        ),
        advice=(
            "Return to an earlier checkpoint with a lower learn.lr or a higher loss.clip_high; a"
            " KL term (loss.kl_coef) or grafts increase variety."
        ),
    ),
    Rule(
        name="policy_still",
        check=_policy_still,
        says="the policy does not move: learning rate in effect {value:.2g}",
        meaning="Updates do not change the policy measurably, although groups have variance.",
        causes=(
            "learn.lr is 0 or very small",
            "a long learn.lr_warmup_steps",
            "the gradient is clipped away or lost in bfloat16",
        ),
        advice=(
            "Check learn/grad_norm and learn/lr: raise learn.lr, shorten its warm-up, or raise"
            " learn.max_grad_norm."
        ),
    ),
    Rule(
        name="truncated",
        check=_from("rollout/truncated_frac"),
        says="trajectories out of tokens, steps or calls: {value:.0%}",
        meaning=(
            "Many trajectories end before they answer, and are rewarded as if they had no answer."
        ),
        causes=(
            "limits too tight for the tasks",
            "long tool results",
            "an agent that repeats itself",
        ),
        advice=(
            "The viewer shows the limit that ended them (stop reason): raise"
            " rollout.max_completion_tokens, max_agent_steps or max_tool_calls, or lower"
            " tools.max_output_chars; against repetition lower learn.lr."
        ),
    ),
    Rule(
        name="violated",
        check=_from("rollout/violation_frac"),
        says="trajectories that broke the format: {value:.0%}",
        meaning=(
            "Most trajectories break the format, so the reward measures the format instead of the"
            " answers."
        ),
        causes=(
            "the model has never seen this format",
            "format rules stricter than needed",
            "a policy that has collapsed",
        ),
        advice=(
            "Warm up (warmup.num_steps), set format.kind = 'chat' for chat models, or relax"
            " format.require_think and require_boxed; if the share rose during training, lower"
            " learn.lr."
        ),
    ),
    Rule(
        name="failed",
        check=_failed,
        says="trajectories lost to failures of ours: {value:.1%}",
        meaning=(
            "The engine or a tool's service failed, or a deadline passed. Failed trajectories are"
            " removed from their groups; too many failures leave nothing to learn."
        ),
        causes=(
            "a tool's service is down or slow",
            "rollout.deadline_s too short",
            "the engine ran out of memory",
        ),
        advice=(
            "The failed leaves (viewer: status failed) and the terminal show the error. Repair the"
            " service, or raise the deadline or tools.num_retries."
        ),
    ),
    Rule(
        name="branch_unused",
        check=_mean_from("branch/unused_frac"),
        says="leaves meant for branches that became fresh starts: {value:.0%}",
        meaning=(
            "The branching rule rarely opens a branch, so the run trains mostly on independent"
            " rollouts."
        ),
        causes=(
            "entropy never rises after results",
            "explore.entropy.threshold out of reach of base_prob",
            "no tool results",
        ),
        advice=(
            "The tree view shows the values of the rule for each step. Lower"
            " explore.entropy.threshold, raise base_prob or entropy_weight, or open more starts"
            " (num_starts)."
        ),
    ),
    Rule(
        name="graft_unused",
        check=_mean_from("graft/unused_frac"),
        says="trajectories that may retrieve and hold no graft: {value:.0%}",
        meaning="The Step-Trace Buffer is rarely used: most hybrid rollouts have no graft.",
        causes=(
            "trajectories end before a second step",
            "nothing eligible in the buffer (retrieve/nothing_frac)",
            "a low probability",
        ),
        advice=(
            "Check retrieve/nothing_frac: if it is high, add traces, lower buffer.min_similarity"
            " or set buffer.terminal = 'exclude'; otherwise raise explore.graft.probability or warm"
            " up on longer trajectories."
        ),
    ),
    Rule(
        name="answer_copied",
        check=_from("graft/copied_frac"),
        says="trajectories with a graft whose answer another agent had written: {value:.0%}",
        meaning=(
            "The answer occurs in the text of a graft and in no tool result: it was copied, and"
            " the reward favours copying. Evaluations have no grafts to copy from."
        ),
        causes=(
            "traces with the final answer (buffer.terminal = 'allow')",
            "traces of the same task",
            "thoughts that mention the answer",
        ),
        advice=(
            "Set buffer.terminal to 'skip' or 'exclude' or buffer.allow_same_task = false, and"
            " check the grafts in the viewer."
        ),
    ),
    Rule(
        name="engine_drift",
        check=_engine_drift,
        says="engine and learner disagree by {value:.3g} nats a token",
        meaning=(
            "Engine and learner differ in their policies; log-probabilities and ratios have an"
            " error of this size."
        ),
        causes=(
            "an engine with different weights or precision",
            "a publish that failed",
            "a different chat template or tokenizer",
        ),
        advice=(
            "Compare learn/engine_gap with learn/engine_gap_limit; three breaches in a row end the"
            " run. Check the engine's model, dtype and version."
        ),
    ),
    Rule(
        name="one_sign",
        check=_one_sign,
        says="loss of one sign: {value:.1%} of its contributions are positive",
        meaning=(
            "The loss only raises, or only lowers, the probability of sampled tokens: only raising"
            " ends in collapse, only lowering in noise."
        ),
        causes=(
            "loss.learn_from_truncated = false while all bad trajectories are truncated",
            "failed leaves",
            "a reward or credit rule of your own",
        ),
        advice=(
            "Check which leaves carry loss (tree view, colour by advantage). Set"
            " loss.learn_from_truncated = true, or balance the reward."
        ),
    ),
    Rule(
        name="tool_failing",
        check=_tool_failing,
        says="the tool {subject} fails more than usual: {value:.0%} of its calls",
        meaning="A tool that worked before returns errors, and the agent learns from these errors.",
        causes=(
            "a service that is down, slow or rate-limited",
            "the agent found a call that always fails",
        ),
        advice=(
            "Filter this update in the viewer by tool error and read the results. Repair the"
            " service, or stop and resume from an earlier checkpoint."
        ),
    ),
    Rule(
        name="tool_broken",
        check=_tool_broken,
        says="the tool {subject} failed in {value:.0%} of its calls",
        meaning="Most calls of this tool return errors.",
        causes=(
            "the agent does not know how to call it",
            "its description is misleading",
            "its service is down",
        ),
        advice=(
            "Read such a call in the viewer (filter: tool error). Correct the tool's description,"
            " repair its service, or warm up on correct calls."
        ),
    ),
    Rule(
        name="not_finite",
        check=_not_finite,
        says="{value:.0f} metrics are no finite numbers",
        meaning="A value overflowed or became NaN; the weights may be unusable from here on.",
        causes=(
            "learning rate too high",
            "a reward that returned NaN",
            "bfloat16 overflow",
        ),
        advice=(
            "Stop, read the first update with this warning, and resume from the checkpoint before"
            " it with a lower learn.lr or in float32."
        ),
    ),
)
