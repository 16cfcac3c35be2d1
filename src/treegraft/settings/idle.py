"""Settings that do nothing unless others are set: naming one of them on the command line is an
error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from treegraft.settings.config import Config


@dataclass(frozen=True, slots=True)
class IdleRule:
    """Settings that do nothing unless others are set."""

    prefix: str
    """A dotted name, or a table with its closing dot."""
    is_idle: Callable[[Config], bool]
    reason: str
    """A format string over `c`, the whole configuration."""
    besides: str = ""
    """The one setting under `prefix` that always counts; empty for none."""


def _ratio_is_one(c: Config) -> bool:
    """Shaping moves the ratio of a grafted trajectory away from 1 also where one step uses a batch
    up (RAPO, eq. 11)."""
    return c.learn.num_minibatches * c.learn.num_epochs == 1 and (
        _without("graft")(c) or c.loss.shaping_weight == 0
    )


_IDLE_CLIP = (
    "an update is one optimiser step (learn.num_minibatches = learn.num_epochs = 1), so the ratio"
    " is exactly 1 and nothing is clipped; raise one of the two"
)
_BACKEND = "tools.python.backend is '{c.tools.python.backend}'; add tools.python.backend=bwrap"
_KIND = "tasks.kind is '{c.tasks.kind}'"
_FORMAT = "format.kind is '{c.format.kind}'; add format.kind=chat"

_EXPLORERS = "explore.explorers is {c.explore.explorers}, without "


def _without(name: str) -> Callable[[Config], bool]:
    return lambda c: (
        name not in c.explore.explorers and not any(":" in own for own in c.explore.explorers)
    )


def _only_sign_counts(c: Config) -> bool:
    own = c.explore.entropy
    return own.rule == "threshold" and own.base_prob == own.threshold and own.entropy_weight > 0


_ONLY_SIGN = (
    "with explore.entropy.rule = 'threshold' and base_prob = threshold ="
    " {c.explore.entropy.threshold} a branch opens wherever entropy rose, by however little; change"
    " base_prob or threshold, or take rule = 'bernoulli'"
)

_SEARCH_KIND = "tools.search.kind is '{c.tools.search.kind}'"
_SEARCH_RULES = (
    IdleRule("tools.search.corpus", lambda c: c.tools.search.kind in ("http", "web"), _SEARCH_KIND),
    IdleRule(
        "tools.search.index_dir", lambda c: c.tools.search.kind in ("http", "web"), _SEARCH_KIND
    ),
    IdleRule("tools.search.encoder", lambda c: c.tools.search.kind != "dense", _SEARCH_KIND),
    IdleRule("tools.search.url", lambda c: c.tools.search.kind != "http", _SEARCH_KIND),
    IdleRule("tools.search.provider", lambda c: c.tools.search.kind != "web", _SEARCH_KIND),
    IdleRule("tools.search.base_url", lambda c: c.tools.search.kind != "web", _SEARCH_KIND),
    IdleRule(
        "tools.search.timeout_s", lambda c: c.tools.search.kind in ("bm25", "dense"), _SEARCH_KIND
    ),
    IdleRule(
        "tools.browse.",
        lambda c: "browse" not in c.tools.use,
        "tools.use is {c.tools.use}, without 'browse'",
    ),
)

IDLE_RULES: tuple[IdleRule, ...] = (
    IdleRule(
        "tasks.search_world.",
        lambda c: c.tasks.kind != "search_world",
        f"{_KIND}; add tasks.kind=search_world",
    ),
    IdleRule(
        "tasks.arithmetic.",
        lambda c: c.tasks.kind != "arithmetic",
        f"{_KIND}; add tasks.kind=arithmetic",
    ),
    IdleRule(
        "tasks.dataset.", lambda c: c.tasks.kind != "dataset", f"{_KIND}; add tasks.kind=dataset"
    ),
    IdleRule(
        "tasks.dataset.reference_after",
        lambda c: not c.tasks.dataset.reference_column,
        "tasks.dataset.reference_column is empty",
    ),
    IdleRule(
        "tasks.options", lambda c: ":" not in c.tasks.kind, f"{_KIND}, which is no import path"
    ),
    IdleRule(
        "model.tiny.",
        lambda c: c.model.path != "tiny",
        "model.path is '{c.model.path}'; add model.path=tiny",
    ),
    IdleRule(
        "model.lora.",
        lambda c: c.model.lora.rank == 0,
        "model.lora.rank is 0; add model.lora.rank=16",
        "model.lora.rank",
    ),
    IdleRule(
        "tools.python.",
        lambda c: "python" not in c.tools.use,
        "tools.use is {c.tools.use}, without 'python'",
    ),
    IdleRule("tools.python.max_files_mb", lambda c: c.tools.python.backend != "bwrap", _BACKEND),
    IdleRule("tools.python.max_threads", lambda c: c.tools.python.backend != "bwrap", _BACKEND),
    IdleRule("tools.cache_path", lambda c: not c.tools.cache, "tools.cache is off"),
    IdleRule("tools.backoff_s", lambda c: c.tools.num_retries == 0, "tools.num_retries is 0"),
    IdleRule(
        "tools.search.",
        lambda c: "search" not in c.tools.use,
        "tools.use is {c.tools.use}, without 'search'",
    ),
    IdleRule("format.chat_template", lambda c: c.format.kind != "chat", _FORMAT),
    IdleRule("format.template_options", lambda c: c.format.kind != "chat", _FORMAT),
    *_SEARCH_RULES,
    IdleRule(
        "environment.",
        lambda c: not c.environment.kind,
        "environment.kind is empty",
        "environment.kind",
    ),
    IdleRule(
        "environment.max_replay_calls",
        lambda c: c.environment.capability in ("fork", "none"),
        "environment.capability is '{c.environment.capability}'",
    ),
    IdleRule(
        "reward.accuracy",
        lambda c: "hierarchical" not in c.reward.funcs,
        "reward.funcs has no 'hierarchical'",
    ),
    IdleRule("explore.entropy.", _without("entropy"), _EXPLORERS + "'entropy'"),
    IdleRule(
        "explore.entropy.threshold",
        lambda c: c.explore.entropy.rule != "threshold",
        "explore.entropy.rule is '{c.explore.entropy.rule}', which tosses a coin instead",
    ),
    IdleRule("explore.entropy.entropy_weight", _only_sign_counts, _ONLY_SIGN),
    IdleRule("explore.entropy.normaliser", _only_sign_counts, _ONLY_SIGN),
    IdleRule(
        "explore.entropy.ranking",
        lambda c: c.explore.entropy.allocation != "round",
        "explore.entropy.allocation is '{c.explore.entropy.allocation}', where each start has its"
        " own part",
    ),
    IdleRule("explore.graft.", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule("buffer.", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule("buffer.", lambda c: c.explore.graft.num_hybrid == 0, "explore.graft.num_hybrid is 0"),
    IdleRule(
        "buffer.", lambda c: c.explore.graft.probability == 0, "explore.graft.probability is 0"
    ),
    IdleRule(
        "buffer.min_similarity",
        lambda c: c.buffer.random_prob == 1,
        "buffer.random_prob is 1, so nothing is sought",
    ),
    IdleRule(
        "buffer.grow.",
        lambda c: c.buffer.grow.num_best == 0,
        "buffer.grow.num_best is 0",
        "buffer.grow.num_best",
    ),
    IdleRule("credit.attribution", _without("entropy"), _EXPLORERS + "one that branches"),
    IdleRule("credit.leaf_weight", _without("entropy"), _EXPLORERS + "one that branches"),
    IdleRule("credit.retrieval_reward", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule("credit.retrieval_weight", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule(
        "credit.retrieval_reward",
        lambda c: c.credit.retrieval_weight == 0,
        "credit.retrieval_weight is 0",
    ),
    IdleRule(
        "credit.retrieval_weight",
        lambda c: c.credit.retrieval_reward == "none",
        "credit.retrieval_reward is 'none'",
    ),
    IdleRule("loss.shaping_weight", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule("loss.graft_coef", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule("loss.graft_form", lambda c: c.loss.graft_coef == 0, "loss.graft_coef is 0"),
    IdleRule(
        "loss.graft_gamma",
        lambda c: c.loss.graft_coef == 0 or c.loss.graft_form != "luffy",
        "loss.graft_coef is {c.loss.graft_coef} and loss.graft_form is '{c.loss.graft_form}'",
    ),
    IdleRule(
        "credit.eps",
        lambda c: c.credit.advantage != "grpo",
        "credit.advantage is '{c.credit.advantage}'",
    ),
    IdleRule(
        "loss.length_constant",
        lambda c: c.loss.aggregation != "sequence-sum",
        "loss.aggregation is '{c.loss.aggregation}'; only 'sequence-sum' divides by it",
    ),
    IdleRule("loss.clip_low", _ratio_is_one, _IDLE_CLIP),
    IdleRule("loss.clip_high", _ratio_is_one, _IDLE_CLIP),
    IdleRule("loss.dual_clip", _ratio_is_one, _IDLE_CLIP),
    IdleRule(
        "health.branch_unused",
        _without("entropy"),
        _EXPLORERS + "'entropy'",
    ),
    IdleRule("health.graft_unused", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule("health.answer_copied", _without("graft"), _EXPLORERS + "'graft'"),
    IdleRule(
        "warmup.",
        lambda c: c.warmup.num_steps == 0,
        "warmup.num_steps is 0; add warmup.num_steps=300",
        "warmup.num_steps",
    ),
    IdleRule(
        "warmup.continue_prob", lambda c: c.warmup.decision_frac == 0, "warmup.decision_frac is 0"
    ),
)
"""Law 10: naming one of these on the command line while it is idle is an error; in a recipe it is a
preset."""

EVALUATION_IGNORES = (
    *(
        "run.name",
        "run.num_updates",
        "run.tasks_per_update",
        "tasks.num_train",
        "rollout.temperature",
    ),
    *(
        "explore.",
        "buffer.",
        "credit.",
        "loss.",
        "learn.",
        "warmup.",
        "checkpoint.",
        "track.trackers",
        "eval.every",
        "eval.at_",
    ),
    "health.",
)
"""What `treegraft eval` and `treegraft run` take no notice of."""
