"""Every metric key with its meaning and unit. The docs are made from this table.

A key is "group/name". Units: `num_` counts, `_frac` 0..1, `_s` seconds; others name their own.
{name} depends on the recipe: a reward function, a tool, a category, a number. `time/*` is not
reproducible."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from treegraft.core.errors import nearest
from treegraft.core.plugin import offered

METRICS: Mapping[str, str] = {
    "update": "number of the update, from 1; 0 is the state before the first",
    "policy_version": "number of the last publish, which is that of the update",
    "reward/mean": "mean reward of scored rollouts, with equal weight for each group; whole stored"
    " trajectories are left out here and in all means and shares of rollout/",
    "reward/std": "mean over groups of the standard deviation of rewards within the group",
    "reward/{func}": "mean unweighted reward by this function over scored leaves",
    "eval/accuracy": "share of held-out tasks that one greedy trajectory answers correctly, 0..1",
    "eval/accuracy_sampled": "share of correct held-out trajectories, sampled as [eval] says, 0..1",
    "eval/pass_at_{k}": "share of tasks that one of k sampled trajectories solves (unbiased), 0..1",
    "eval/accuracy_{category}": "eval/accuracy of this category, 0..1",
    "rollout/num_rounds": "rounds of tasks that were sampled (rollout.max_rounds)",
    "rollout/num_dropped_groups": "groups sampled and not learned from: without variance of reward,"
    " or more than run.tasks_per_update",
    "rollout/second_stage_frac": "share of trees that grew on after their first leaves were scored"
    " (explore.num_first)",
    "rollout/num_trajectories": "trajectories grown in this update",
    "rollout/num_sampled_tokens": "tokens sampled by the policy, each counted once",
    "rollout/num_tool_calls": "executed tool calls",
    "rollout/num_shown_calls": "tool calls whose results stand in trees, those of grafts and stored"
    " steps included, each counted once",
    "rollout/tool_calls_mean": "mean tool calls of a trajectory",
    "rollout/steps_mean": "mean steps of a trajectory",
    "rollout/retrieved_frac": "share of grafted tokens among the tokens after the prompt",
    "rollout/completed_frac": "share of trajectories with an answer in the expected format",
    "rollout/truncated_frac": "share of trajectories out of tokens, steps or tool calls",
    "rollout/violation_frac": "share of trajectories that broke the format",
    "rollout/failed_frac": "share that failed by no fault of the agent; they leave their groups",
    "rollout/accuracy": "share of scored trajectories that match exactly or as mathematics, 0..1",
    "branch/num_branches": "branches opened by explorers",
    "branch/num_starts": "first-level rollouts, those that fill up the budget included",
    "branch/unused_frac": "share of the leaves meant for branches that became fresh starts",
    "graft/num_grafts": "attached steps of other agents",
    "graft/hybrid_frac": "share of trajectories with at least one graft",
    "graft/unused_frac": "share of trajectories without a graft among those that may retrieve",
    "graft/answer_frac": "share of answers after a graft that occur first in its words or results",
    "graft/copied_frac": "share of them that occur in another agent's words and in no tool result",
    "graft/same_task_frac": "share of grafts from the same task",
    "graft/similarity_mean": "mean cosine between the history and the graft's key, -1..1",
    "graft/cut_frac": "share of grafts cut from the left because the token limit was near",
    "graft/num_without_room": "retrieved steps not attached because the token limit was too near",
    "graft/source_reward_mean": "mean reward of the trajectories from which the grafts come",
    "graft/reward_hybrid": "mean reward of trajectories with a graft",
    "graft/reward_on_policy": "mean reward of trajectories without a graft",
    "sampler/num_known": "tasks with a success rate that rollouts have shown (sampler.kind"
    ' = "difficulty")',
    "sampler/rate_mean": "mean success rate that was expected of the tasks dealt",
    "sampler/error_mean": "mean |expected success rate - the one that their rollouts showed|",
    "sampler/num_references": "tasks rolled out for their success rates alone; their trajectories,"
    " tokens and calls count in rollout/num_*, and nowhere else",
    "sampler/reference_rate": "their mean success rate",
    "replay/num_groups": "groups of earlier updates that were learned from once more",
    "replay/num_kept": "groups that later updates may replay",
    "replay/age_mean": "mean number of updates since replayed groups were sampled",
    "restart/num_restarts": "rollouts that began below stored steps",
    "restart/num_whole": "stored trajectories that are leaves of their group",
    "restart/num_places": "places below which rollouts began; each is a group of its own",
    "restart/steps_mean": "mean number of stored steps above a rollout that began below some",
    "retry/num_retries": "rollouts behind a forced opening of a tool call or an answer",
    "retry/num_places": "steps that were tried again",
    "retry/mixed_frac": "share of these steps whose retries have different rewards",
    "retry/reward": "mean reward of the retries",
    "restart/num_untrue": "stored trajectories left out because the environment contradicted them",
    "restart/num_failed": "trees and places without stored steps because of an error or deadline",
    "restart/reward_below": "mean reward of rollouts below stored steps",
    "restart/reward_prompt": "mean reward of rollouts from the prompt, where others began below"
    " stored steps",
    "retrieve/num_asked": "requested retrievals",
    "retrieve/num_keys_cut": "histories cut at the beginning because the encoder reads no more",
    "retrieve/nothing_frac": "share of retrievals without an eligible trace",
    "time/retrieve_s": "seconds of retrieval with its embedding; it runs while the engine works",
    "buffer/num_traces": "traces in the Step-Trace Buffer",
    "buffer/num_own": "traces in it from the agent in training",
    "learn/loss": "loss, mean over optimiser steps",
    "learn/grad_norm": "norm of the gradient before clipping, mean over optimiser steps",
    "learn/lr": "learning rate of the last optimiser step",
    "learn/clip_frac": "share of contributions whose gradient was clipped",
    "learn/engine_capped_frac": "share of contributions at the cap loss.engine_ratio_cap",
    "learn/entropy": "mean entropy of sampled tokens under the policy, in nats, per contribution",
    "learn/approx_kl": "mean k3 estimate of KL(old || new) per contribution, in nats",
    "learn/ratio_max": "largest ratio of new to old probability of a contribution",
    "learn/kl": "mean k3 estimate of KL(policy || reference) per contribution, in nats",
    "learn/unique_frac": "unique tokens per token of all trajectories",
    "learn/num_unique_tokens": "unique tokens in the forward pass, prompts included",
    "learn/num_contributions": "pairs of a loss token and a trajectory that contains it",
    "learn/num_lesson_tokens": "tokens of grafts that are learned from, each counted once",
    "learn/lesson_logprob": "mean log-probability of these tokens, in nats, per trajectory",
    "lesson/num_lessons": "stored trajectories learned beside the trees (loss.lesson_coef)",
    "lesson/num_earlier": "those of them at tasks of earlier updates (learn.num_lessons)",
    "lesson/weight_mean": "mean weight of a lesson, its reward less the agent's mean one, 0..1",
    "lesson/value": "decayed mean reward of the agent over tasks, from which weights count",
    "lesson/logprob": "mean log-probability of the tokens of lessons with a weight, in nats",
    "learn/num_optimiser_steps": "optimiser steps of this update; skipped groups alone take none",
    "learn/positive_frac": "share of positive advantages among the contributions where it is not 0",
    "learn/skipped_groups_frac": "share of groups without variance of reward, which are skipped",
    "learn/engine_gap": "mean |engine's - learner's log-probability| over learned tokens, in nats",
    "learn/engine_gap_limit": "largest accepted learn/engine_gap, in nats",
    "learn/canary_gap": "largest mean |server's - learner's log-probability| over the canary tokens"
    " of a server after the publish, in nats",
    "learn/success_logprob_change": "mean change of the log-probability of successful trajectories'"
    " own tokens by the update, in nats a token (health.symptoms_every; not with"
    " loss.old_logprobs = engine)",
    "learn/question_information": "share of the question's identity that first steps show: 0 where"
    " they are as likely for any other question, at most 1 (health.symptoms_every)",
    "learn/open_call_prob": "mean probability that the policy opens a call where it called or"
    " answered, behind its own thought, 0..1 (health.symptoms_every)",
    "learn/open_answer_prob": "the same of an answer, where the format can open one",
    "learn/open_prob": "sum of both: the rest breaks the format",
    "eval/completed_frac": "share of held-out trajectories with an answer in the expected format",
    "eval/failed_frac": "share of held-out trajectories lost to failures of ours, counted as wrong",
    "eval/tool_calls_mean": "mean tool calls of a held-out trajectory",
    "eval/accuracy_sampled_{category}": "eval/accuracy_sampled of this category, 0..1",
    "eval/gain": "eval/accuracy at the end minus that at the start, over the same tasks",
    "eval/gain_low": "lower end of its 95 % paired bootstrap interval",
    "eval/gain_high": "upper end of its 95 % paired bootstrap interval",
    "eval/gain_sampled": "the same of eval/accuracy_sampled",
    "eval/gain_sampled_low": "lower end of its 95 % paired bootstrap interval",
    "eval/gain_sampled_high": "upper end of its 95 % paired bootstrap interval",
    "time/rollout_s": "seconds to grow all trees, scores included",
    "time/warmup_s": "seconds of the warm-up, without evaluations",
    "time/warmup_cpu_s": "CPU seconds of all threads of this process in the same",
    "time/credit_s": "seconds to compute advantages",
    "time/learn_s": "seconds to learn",
    "time/symptoms_s": "seconds of health.symptoms_every",
    "time/publish_s": "seconds to publish the weights to the engine",
    "time/eval_s": "seconds of evaluation in this update",
    "time/update_s": "seconds of the whole update",
    "time/cpu_s": "CPU seconds of all threads of this process in the update, without evaluation",
    "time/tool_{name}_s": "mean seconds of a call of this tool",
    "tools/{name}_calls": "calls of this tool",
    "tools/{name}_failure_frac": "share of its calls that returned an error",
    "tools/{name}_found_frac": "share of the trajectories that searched in whose results the"
    " reference occurs",
    "time/tool_{name}_retries": "retries of calls whose service failed",
    "time/tool_{name}_cached_frac": "share of its calls answered from cache, empty after a resume",
    "environment/num_opened": "environments created and reset, those for replays included",
    "environment/num_forks": "copies of an environment's state that branches and grafts took",
    "environment/num_replays": "states restored for branches and grafts by repeating the calls",
    "environment/num_replayed_calls": "calls repeated for them",
    "environment/num_mismatches": "resets and replays unlike the recorded; each fails a trajectory",
    "environment/num_failures": "resets, copies, calls and rewards that failed or took too long",
    "environment/num_rehearsals": "retrievals whose steps were tried in an environment",
    "environment/num_graft_tries": "steps tried, up to buffer.num_tries for each retrieval",
    "environment/num_graft_calls": "calls made to try them, without the replayed ones before",
    "environment/num_untrue_grafts": "retrievals left out: the environment answers otherwise",
    "environment/untrue_graft_frac": "share of them among the retrievals that were tried",
    "time/environment_copies": "copies made, with those that no branch took (depends on timing)",
    "eval/environment_reward": "mean environment reward of held-out trajectories that have one",
    "health/{name}": "number that caused this warning, active after this update (docs/warnings.md)",
    "warmup/loss": "supervised loss per token that carries loss, in nats",
    "warmup/num_steps": "optimiser steps of the warm-up so far",
    "warmup/num_loss_tokens": "tokens imitated in the warm-up so far, counted at each draw",
    "warmup/skill": "share of teacher-forced steps predicted exactly in call or answer, 0..1",
    "time/engine_servers": "servers that answer at the end of the update",
    "time/engine_requests": "requests to servers; a completion with a probe takes two",
    "time/engine_moved": "requests that were asked again, of another server or after a restart",
    "time/engine_stale": "replies by other weights than those that were due; they were asked again",
    "time/engine_drained": "times that a slow server's requests went to others until a publish",
    "time/engine_restarts": "times that a server was started again or waited for",
    "time/engine_cached_frac": "share of the requests' tokens that servers had in their caches",
    "time/publish_bytes": "size of the weights given to servers, in bytes",
    "time/engine_evictions": "cached blocks evicted and recomputed when needed (depends on timing)",
    "time/engine_rows_mean": "mean rows of a forward pass of the engine (depends on timing)",
}
"""Key or pattern -> one line with the unit."""


@functools.cache
def known_metrics() -> Mapping[str, str]:
    """Returns every metric key with its meaning, those of plugins behind ours."""
    return {**METRICS, **offered("metrics")}


@functools.cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Pattern and key in the table."""
    # Longer patterns first, so that the most specific one wins: "eval/accuracy_sampled_{category}"
    # before "eval/accuracy_{category}".
    keys = sorted((key for key in known_metrics() if "{" in key), key=len, reverse=True)
    compiled = []
    for key in keys:
        before, after = map(re.escape, re.split(r"\{\w+\}", key))
        # A name may be any text but the slash that ends a group; {k} is a count.
        inner = r"\d+" if "{k}" in key else "[^/]+"
        compiled.append((re.compile(f"{before}({inner}){after}"), key))
    return compiled


def find_entry(key: str) -> tuple[str, str] | None:
    """Returns the key of the table that a metric's key belongs to, and the name that stands in it
    for {name}, "" for none; None for a key that the table does not know."""
    if key in known_metrics():
        return key, ""
    found = ((known, pattern.fullmatch(key)) for pattern, known in _patterns())
    return next(((known, match[1]) for known, match in found if match), None)


def find_meaning(key: str) -> str | None:
    """Returns the meaning of a metric, None for a key that the table does not know."""
    entry = find_entry(key)
    return None if entry is None else known_metrics()[entry[0]]


def meaning(key: str) -> str:
    """Returns the meaning of a metric; raises KeyError, naming the nearest one, where there is
    none."""
    found = find_meaning(key)
    if found is None:
        raise KeyError(
            f"unknown metric '{key}'.{nearest(key, known_metrics())} Its meaning belongs in"
            " metrics.py."
        )
    return found


def check_known(keys: Iterable[str]) -> None:
    """Raises KeyError for the first key without a meaning."""
    for key in keys:
        meaning(key)
