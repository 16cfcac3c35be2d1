"""Settings of explorers, and of the buffer that grafts come from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pydantic import field_validator

from treegraft.core.kinds import ExplorerKind
from treegraft.core.registry import registered
from treegraft.settings.table import Condition, Settings, has, setting, value_of, when

with_arpo = has("explore.explorers", "entropy", or_own=True)
with_graft = has("explore.explorers", "graft", or_own=True)
_by_threshold = when("explore.entropy.rule", "threshold")
MADE_BY_RUN = ("expert", "self")
"""Values of buffer.path that name no file."""

# By import path: settings are read without what makes explorers.
_BUILD = "treegraft.explore.build"
CORE_EXPLORERS: Mapping[str, ExplorerKind] = {
    "independent": ExplorerKind(title="GRPO", make=f"{_BUILD}:make_independent"),
    "entropy": ExplorerKind(
        title="ARPO",
        make=f"{_BUILD}:make_entropy",
        leads=True,
        leaves="explore.entropy.num_starts",
        opens_at_once=True,
        branches=True,
    ),
    "graft": ExplorerKind(
        title="RAPO",
        make=f"{_BUILD}:make_graft",
        retrieves=True,
        teaches=lambda config: True,
    ),
}
"""The core's explorers."""
_BY_METHOD = {str(kind.title).casefold(): name for name, kind in CORE_EXPLORERS.items()}


def explorer_kinds(names: Sequence[str]) -> dict[str, ExplorerKind]:
    """Returns the facts about those of the explorers that have a name, import paths left out."""
    return _kinds(tuple(names))


@functools.cache
def _kinds(names: tuple[str, ...]) -> dict[str, ExplorerKind]:
    # Once for each list of names: settings, checks and every part of a run go by these facts.
    found: dict[str, ExplorerKind] = {}
    for name in names:
        if name in CORE_EXPLORERS:
            found[name] = CORE_EXPLORERS[name]
        elif entry := registered("explorer").get(name):
            found[name] = entry.value
    return found


def chosen_kinds(config: Settings) -> dict[str, ExplorerKind]:
    """Returns `explorer_kinds` of explore.explorers."""
    return explorer_kinds(value_of(config, "explore.explorers"))


def has_own(config: Settings) -> bool:
    """Returns whether explore.explorers names an import path, which may do anything."""
    return any(":" in name for name in value_of(config, "explore.explorers"))


def retrieving(explorers: Sequence[str]) -> list[str]:
    """Returns the explorers of a list that need a Step-Trace Buffer, own ones left out."""
    return [name for name, kind in explorer_kinds(explorers).items() if kind.retrieves]


def idle_told(config: Settings) -> dict[str, Callable[[Settings], str]]:
    """Returns, for settings that a chosen explorer uses in a way of its own, why they have no
    effect, a function as in `Facts.idle_unless`."""
    told: dict[str, Callable[[Settings], str]] = {}
    for kind in chosen_kinds(config).values():
        told |= kind.idle
    return told


def defaults_told(config: Settings) -> dict[str, Any]:
    """Returns the defaults that chosen explorers have for settings of others, by dotted name."""
    told: dict[str, Any] = {}
    # The first explorer of the list decides, as it does about starts.
    for kind in chosen_kinds(config).values():
        told = {**kind.defaults, **told}
    return told


def teaches(config: Settings) -> str:
    """Returns why nothing is learned that the agent did not sample, "" where it can be: grafts,
    whole stored trajectories, forced openings."""
    if any(kind.teaches(config) for kind in chosen_kinds(config).values()):
        return ""
    return with_graft(config)


_grafts = (with_graft, when("explore.graft.num_hybrid"), when("explore.graft.probability"))


def takes_warmup_of_buffer(config: Settings) -> bool:
    """Returns whether the warm-up imitates the buffer of [buffer]."""
    num_steps = value_of(config, "warmup.num_steps")
    traces = value_of(config, "warmup.traces")
    return bool(num_steps) and traces == "buffer"


def reads_buffer(config: Settings) -> str:
    """Returns why the buffer has no effect; "" where grafts, stored steps, lessons or the warm-up
    come from it."""
    has_lessons = bool(value_of(config, "loss.lesson_coef"))
    others = set(retrieving(value_of(config, "explore.explorers"))) - {"graft"}
    if has_lessons or takes_warmup_of_buffer(config) or others:
        return ""
    return next(filter(None, (condition(config) for condition in _grafts)), "")


def half_the_leaves(config: Settings) -> int:
    """Returns half of explore.num_leaves, at least 1."""
    # A tree of one leaf still has a start.
    return max(1, int(value_of(config, "explore.num_leaves")) // 2)


class EntropySettings(Settings):
    """ARPO's rule for branches (arXiv 2507.19849), see `EntropyBranching`."""

    # ARPO, app. C: 8 of 16.
    num_starts: int = setting(8, ge=1, default_of=half_the_leaves)
    """First-level rollouts (ARPO's N), at most explore.num_leaves (its M), of which half is the
    default; the rest are branches and back-fill."""
    num_branches: int = setting(1, ge=1)
    """Further children opened at a step that branches (ARPO's Z); the rollout itself goes on
    besides."""
    probe_tokens: int = setting(20, ge=1)
    """First tokens after a tool result whose entropies are compared (ARPO's k)."""
    rule: Literal["threshold", "bernoulli"] = "threshold"
    """"threshold" branches where the probability exceeds `threshold` (the paper); "bernoulli"
    tosses a coin with that probability (the released code)."""
    base_prob: float = setting(0.5, ge=0, le=1)
    """Probability of branching where entropy did not change (ARPO's alpha)."""
    entropy_weight: float = setting(0.2, ge=0)
    """Rise of the probability per unit of entropy change (ARPO's beta)."""
    threshold: float = setting(0.5, ge=0, le=1, idle_unless=_by_threshold)
    """Probability above which the threshold rule branches (ARPO's tau)."""
    statistic: Literal["probe", "lagging"] = "probe"
    """"probe": the tokens after the newest result (the paper); "lagging": the first tokens of the
    step that made the call, one result late (the released code)."""
    normaliser: Literal["vocabulary", "log_vocabulary", "none"] = "vocabulary"
    """Divisor of the summed change in nats: the vocabulary's size V (ARPO's paper), ln V (the
    released codes; the default with "balanced"), or 1."""


class GraftSettings(Settings):
    num_hybrid: int = setting(8, ge=0, default_of=half_the_leaves)
    """Leaves of explore.num_leaves whose rollouts may retrieve (RAPO's N_hybrid), half of them by
    default: the last starts, or evenly spread ones where starts come in stages."""
    probability: float = setting(0.5, ge=0, le=1)
    """Probability of retrieving before a step, tossed anew at each eligible one: not the first, and
    not after a graft."""
    unit: Literal["step", "trajectory"] = "step"
    """"step" grafts one step at a time; "trajectory" once, with the rest of the other agent's
    trajectory (the ablation TO)."""


def _has_stages(config: Settings) -> str:
    first = value_of(config, "explore.explorers")[0]
    if first in ("independent", "graft"):
        return ""
    return f"the first of explore.explorers is '{first}', which has a rule of its own for that"


class ExploreSettings(Settings):
    # The simplest method by default, so that a method is always a choice.
    explorers: list[str] = setting(["independent"], min_length=1, seam="explorer")
    """Ordered list of "independent" (the GRPO family: all leaves are starts), "entropy" (ARPO),
    "graft" (RAPO), names that extensions bring, or import paths "package.module:Explorer". Starts
    come from the first, grafts from the first that wants one, branches from all. "grpo", "arpo" and
    "rapo" are aliases of the first three."""
    num_leaves: int = setting(16, ge=1)
    """Leaves of a tree (ARPO's M, RAPO's N_on + N_hybrid; others say group size or
    num_generations)."""
    num_first: int | None = setting(None, ge=2, idle_unless=(_has_stages,))
    """Leaves that a tree of "independent" or "graft" begins with. They are scored, and the others
    follow only where their rewards differ; None opens all at once."""
    fill_from: float | None = setting(
        None, idle_unless=(Condition("explore.num_first", bool), _has_stages)
    )
    """Mean reward of the first leaves from which the others follow; None for any."""
    entropy: EntropySettings = setting(EntropySettings(), idle_unless=with_arpo)
    """Entropy-based adaptive branching (ARPO, arXiv 2507.19849)."""
    graft: GraftSettings = setting(GraftSettings(), idle_unless=with_graft)
    """Hybrid-policy rollout (RAPO, arXiv 2603.03078)."""

    @field_validator("explorers")
    @classmethod
    def _named(cls, explorers: list[str]) -> list[str]:
        """Names of methods as those of their explorers."""
        return [_BY_METHOD.get(one.casefold(), one) for one in explorers]


def _grown(config: Settings) -> int:
    return int(value_of(config, "buffer.path") == "self")


class GrowSettings(Settings):
    num_best: int = setting(0, ge=0, default_of=_grown)
    """Trajectories of each tree that are added to the buffer, the best by reward; 0 leaves the
    buffer as it is."""
    min_reward: float = 1.0
    """Reward from which a trajectory is worth keeping."""


_asks_a_server = Condition("buffer.build.agent", lambda agent: agent != "expert")


def _building(default: Any, **facts: Any) -> Any:
    """A setting that only `treegraft buffer build` reads."""
    return setting(default, only_for="buffer build", **facts)


class BuildSettings(Settings):
    """Settings of `treegraft buffer build`; of a .jsonl file as buffer.path, `num_best` and
    `min_reward` count."""

    agent: str = _building("expert", acts="sends")
    """The agent that answers the training tasks: "expert" (the tasks' scripted expert), or the URL
    of an OpenAI-compatible server."""
    source: str | None = _building(None, acts="nothing")
    """Name of the agent in the buffer; None for "expert" or the server's model."""
    # RAPO, app. C.3.
    num_samples: int = _building(16, ge=1)
    """Attempts per task (RAPO's N)."""
    # RAPO, app. C.3.
    num_best: int = setting(5, ge=1)
    """Trajectories stored per task, the best by reward (RAPO's K)."""
    min_reward: float = 0.0
    """Only trajectories with a reward above this are stored."""
    num_tasks: int | None = _building(None, ge=1)
    """Training tasks that are answered, the first ones; None for all."""
    temperature: float = _building(1.0, ge=0, idle_unless=_asks_a_server)
    """Temperature of a server."""
    max_concurrent: int = _building(16, ge=1)
    """Attempts at the same time."""


class BufferSettings(Settings):
    path: str = setting("", acts="reads", retrieval_source=True)
    """The Step-Trace Buffer that grafts come from: a file of `treegraft buffer build` (variables
    are expanded), a .jsonl file of trajectories as `treegraft buffer import` reads them, of which
    the run makes its own buffer, "expert": the tasks' scripted expert solves the training tasks
    before the first update, or "self": empty at first, then the agent's own best trajectories alone
    (`buffer.grow`)."""
    build: BuildSettings = BuildSettings()
    """Filling a buffer with the trajectories of an agent."""
    encoder: str = setting("minilm", acts="reads")
    """Encoder of keys into vectors: "minilm" (the papers'), "hashing" (words, no model), a
    sentence-transformers folder or hub id, or "pypi:PACKAGE". A buffer answers to the encoder that
    it was built with."""
    # The paper does not say; "skip" never shows the agent an answer.
    terminal: Literal["skip", "exclude", "allow"] = setting("skip", idle_unless=with_graft)
    """Steps that hold the final answer: "skip" retrieves nothing where one is the nearest,
    "exclude" uses the nearest of the others, "allow" uses it (a reading of the paper; it leaks
    answers of the training tasks)."""
    # On, as in RAPO, whose buffer is made of the training tasks.
    allow_same_task: bool = True
    """Let traces of the very same task be retrieved; where a trace has no task id, its question
    tells."""
    min_similarity: float = setting(-1.0, ge=-1, le=1, idle_unless=with_graft)
    """Cosine under which nothing is retrieved."""
    random_prob: float = setting(0.0, ge=0, le=1, idle_unless=with_graft)
    """Probability of a random trace instead of the nearest (RAPO sec. 5.5.2's noise rate p)."""
    grow: GrowSettings = setting(GrowSettings(), idle_unless=when("buffer.grow.num_best"))
    """A buffer that learns from the agent's own best trajectories."""
