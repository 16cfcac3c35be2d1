"""Settings of explorers, and of the buffer that grafts come from."""

from __future__ import annotations

from typing import Literal

from treegraft.settings.table import Condition, Settings, has, setting, value_of, when

with_arpo = has("explore.explorers", "entropy", or_own=True)
with_entropy = Condition(
    "explore.explorers",
    lambda names: any(name in ("entropy", "balanced") or ":" in name for name in names),
    ", without 'entropy' and 'balanced'",
)
_by_threshold = when("explore.entropy.rule", "threshold")
with_balanced = has("explore.explorers", "balanced")
with_graft = has("explore.explorers", "graft", or_own=True)
with_peaks = has("explore.explorers", "entropy_peaks")
with_tree_search = has("explore.explorers", "tree_search")
with_prefix = has("explore.explorers", "prefix")
with_axpo = has("explore.explorers", "axpo")
with_commit = has("explore.explorers", "commit")
RETRIEVING = ("graft", "prefix")
"""Explorers that need a Step-Trace Buffer."""
MADE_BY_RUN = ("expert", "self")
"""Values of buffer.path that name no file."""


def retrieves(explorers: list[str]) -> bool:
    """Returns whether a list of explorers has a built-in one that needs a Step-Trace Buffer."""
    return any(name in explorers for name in RETRIEVING)


def teaches(config: Settings) -> str:
    """Returns why nothing is learned that the agent did not sample, "" where it can be: grafts,
    whole stored trajectories, forced openings."""
    is_whole = value_of(config, "explore.prefix.rule") == "whole"
    if not with_commit(config) or (is_whole and not with_prefix(config)):
        return ""
    return with_graft(config)


_grafts = (with_graft, when("explore.graft.num_hybrid"), when("explore.graft.probability"))


def takes_warmup_of_buffer(config: Settings) -> bool:
    """Returns whether the warm-up imitates the buffer of [buffer]."""
    num_steps, traces = value_of(config, "warmup.num_steps"), value_of(config, "warmup.traces")
    return bool(num_steps) and traces == "buffer"


def reads_buffer(config: Settings) -> str:
    """Returns why the buffer has no effect; "" where grafts, stored steps, lessons or the warm-up
    come from it."""
    has_lessons = bool(value_of(config, "loss.lesson_coef"))
    if has_lessons or takes_warmup_of_buffer(config) or not with_prefix(config):
        return ""
    return next(filter(None, (condition(config) for condition in _grafts)), "")


def _size_of_rise_counts(config: Settings) -> str:
    own: EntropySettings = value_of(config, "explore.entropy")
    # The penalty moves the probability, so that a rise has to make up for it.
    if not with_balanced(config):
        return ""
    # base_prob + entropy_weight * change > threshold = base_prob: the sign of the change decides.
    if own.rule != "threshold" or own.base_prob != own.threshold or own.entropy_weight <= 0:
        return ""
    return (
        "with explore.entropy.rule = 'threshold' and base_prob = threshold ="
        f" {own.threshold} a branch opens wherever entropy rose, by however little; change"
        " base_prob or threshold, or take rule = 'bernoulli'"
    )


def _half_the_leaves(config: Settings) -> int:
    return max(1, int(value_of(config, "explore.num_leaves")) // 2)


def _starts_are_planned(config: Settings) -> str:
    if with_balanced(config):
        return ""
    return "explore.explorers has 'balanced', which starts from one probe of the newest results"


def _threshold_counts(config: Settings) -> str:
    # AEPO's coin has it as well.
    return "" if not with_balanced(config) else _by_threshold(config)


def _base_counts(config: Settings) -> str:
    if with_balanced(config) or value_of(config, "explore.entropy.rule") == "threshold":
        return ""
    return "explore.explorers has 'balanced', whose coin knows explore.entropy.threshold alone"


def _normaliser_of(config: Settings) -> str:
    return "vocabulary" if with_balanced(config) else "log_vocabulary"


class EntropySettings(Settings):
    num_starts: int = setting(
        8, ge=1, default_of=_half_the_leaves, idle_unless=(_starts_are_planned,)
    )
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
    base_prob: float = setting(0.5, ge=0, le=1, idle_unless=(_base_counts,))
    """Probability of branching where entropy did not change (ARPO's alpha)."""
    entropy_weight: float = setting(0.2, ge=0, idle_unless=(_size_of_rise_counts,))
    """Rise of the probability per unit of entropy change (ARPO's beta)."""
    threshold: float = setting(0.5, ge=0, le=1, idle_unless=(_threshold_counts,))
    """Probability above which the threshold rule branches (ARPO's tau)."""
    statistic: Literal["probe", "lagging"] = setting("probe", idle_unless=(_starts_are_planned,))
    """"probe": the tokens after the newest result (the paper); "lagging": the first tokens of the
    step that made the call, one result late (the released code)."""
    normaliser: Literal["vocabulary", "log_vocabulary", "none"] = setting(
        "vocabulary", default_of=_normaliser_of, idle_unless=(_size_of_rise_counts,)
    )
    """Divisor of the summed change in nats: the vocabulary's size V (ARPO's paper), ln V (the
    released codes; the default with "balanced"), or 1."""
    allocation: Literal["round", "shares"] = "round"
    """Who gets branches: "round" lets all leaves of the tree propose, then grants (the papers);
    "shares" gives each start its own part, so that no decision waits."""
    ranking: Literal["order", "entropy"] = setting(
        "order", idle_unless=when("explore.entropy.allocation", "round")
    )
    """Who comes first within a round: the order in the tree (the released code), or the largest
    entropy change."""


class GraftSettings(Settings):
    num_hybrid: int = setting(8, ge=0, default_of=_half_the_leaves)
    """Leaves of explore.num_leaves whose rollouts may retrieve (RAPO's N_hybrid), half of them by
    default: the last starts, or evenly spread ones where starts come in stages."""
    probability: float = setting(0.5, ge=0, le=1)
    """Probability of retrieving before a step, tossed anew at each eligible one: not the first, and
    not after a graft."""
    unit: Literal["step", "trajectory"] = "step"
    """"step" grafts one step at a time; "trajectory" once, with the rest of the other agent's
    trajectory (the ablation TO)."""


class BalancedSettings(Settings):
    budget_weight: float = setting(0.5, ge=0)
    """How strongly entropy after results moves leaves from the prompt to branches (AEPO's beta; 0.5
    in its code): of k leaves, k * sigmoid(-this * the mean rise) start at the prompt."""
    penalty: float = setting(0.05, ge=0, le=1)
    """Loss of branching probability for each of the path's latest branches in a row, as a share
    (AEPO's gamma'; 0.05 in its code)."""


def _two_at_most(config: Settings) -> int:
    return min(2, int(value_of(config, "explore.num_leaves")))


class TreeSearchSettings(Settings):
    num_starts: int = setting(2, ge=1, default_of=_two_at_most)
    """First-level rollouts (Tree-GRPO's M trees of a prompt), at most explore.num_leaves."""
    num_nodes: int = setting(2, ge=1)
    """Steps of each rollout that get a further child in a round (Tree-GRPO's N). Rounds go on until
    explore.num_leaves are used up."""


def _has_stages(config: Settings) -> str:
    first = value_of(config, "explore.explorers")[0]
    if first in ("independent", "graft"):
        return ""
    return f"the first of explore.explorers is '{first}', which has a rule of its own for that"


def _restarts(config: Settings) -> int:
    if value_of(config, "explore.prefix.rule") == "whole":
        return 1
    return _half_the_leaves(config)


class PrefixSettings(Settings):
    rule: Literal["prefixrl", "bread", "whole"] = "prefixrl"
    """"prefixrl" begins rollouts below a number of steps drawn at random; "bread" only where all
    own rollouts failed, below as few steps as give a success; "whole" takes the stored trajectory
    itself as a leaf of the group (LUFFY)."""
    num_restarts: int = setting(8, ge=1, default_of=_restarts)
    """Leaves of explore.num_leaves that begin below stored steps, half of them by default; with
    "whole" stored trajectories that are leaves, 1 by default. The others begin at the prompt."""
    num_places: int = setting(1, ge=1, idle_unless=when("explore.prefix.rule", "prefixrl"))
    """Places along the stored trajectory over which "prefixrl" spreads its leaves."""
    num_probes: int = setting(2, ge=1, idle_unless=when("explore.prefix.rule", "bread"))
    """Leaves with which "bread" tries a place; what its search leaves over goes to the place
    that it found."""
    min_reward: float = 1.0
    """Reward from which a stored trajectory is used, and from which a rollout is a success."""


class PeaksSettings(Settings):
    num_starts: int = setting(8, ge=1, default_of=_half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest are
    branches."""


def _names_tools(config: Settings) -> str:
    if value_of(config, "format.kind") == "chat":
        return "format.kind is 'chat', in which a call begins before the tool is named"
    return ""


def _at_answers(config: Settings) -> str:
    return _names_tools(config) or when("explore.axpo.places", "answers")(config)


class AxpoSettings(Settings):
    num_starts: int = setting(8, ge=1, default_of=_half_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which half is the default; the rest are
    retries, where they are called for."""
    num_retries: int = setting(4, ge=1)
    """Retries of one step (AXPO's K); each such place is a group of its own."""
    places: Literal["calls", "answers"] = "calls"
    """Steps that are retried: "calls" (the paper) those that called a tool, where every rollout
    that called one failed; "answers" (ours) those that answered, where every rollout failed."""
    tool: str = setting("", idle_unless=(_at_answers,))
    """The tool whose call is opened in place of an answer; empty for the first."""
    min_reward: float = 1.0
    """Reward from which a rollout did not fail."""


def _quarter_of_the_leaves(config: Settings) -> int:
    return max(1, int(value_of(config, "explore.num_leaves")) // 4)


def _marks_answers(config: Settings) -> bool:
    return bool(value_of(config, "format.kind") != "chat")


class CommitSettings(Settings):
    num_starts: int = setting(4, ge=1, default_of=_quarter_of_the_leaves)
    """First-level rollouts, at most explore.num_leaves, of which a quarter is the default."""
    num_more: int = setting(0, ge=0)
    """Leaves at the prompt that follow where only some of the first rollouts succeeded, as far as
    explore.num_leaves allows."""
    num_retries: int = setting(2, ge=1)
    """Rollouts that go on in place of one answer, in each round."""
    tool: str = setting("", idle_unless=(_names_tools,))
    """The tool whose call is opened in place of an answer; empty for the first."""
    answers: bool = setting(True, default_of=_marks_answers)
    """Whether answers are begun in place of calls, too, where no rollout has answered; the format
    "chat" has no mark that begins one."""
    min_reward: float = 1.0
    """Reward from which a rollout did not fail."""


class ExploreSettings(Settings):
    explorers: list[str] = setting(
        ["independent"],
        min_length=1,
        built_in=(
            *("independent", "entropy", "graft", "tree_search", "balanced", "entropy_peaks"),
            *("prefix", "axpo", "commit"),
        ),
    )
    """Ordered list of "independent" (the GRPO family: all leaves are starts), "entropy" (ARPO),
    "graft" (RAPO), "tree_search" (Tree-GRPO), "balanced" (AEPO), "entropy_peaks" (APPO), "prefix"
    (rollouts below steps of stored trajectories), "axpo" (AXPO), "commit" (calls in place of
    answers that failed), or import paths "package.module:Explorer". Starts come from the first,
    grafts from the first that wants one, branches from all."""
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
    entropy: EntropySettings = setting(EntropySettings(), idle_unless=with_entropy)
    """Entropy-based adaptive branching (ARPO, arXiv 2507.19849)."""
    balanced: BalancedSettings = setting(BalancedSettings(), idle_unless=with_balanced)
    """Budget and penalty of balanced branching (AEPO, arXiv 2510.14545); its rule is that of
    [explore.entropy]."""
    entropy_peaks: PeaksSettings = setting(PeaksSettings(), idle_unless=with_peaks)
    """Branches of finished rollouts at their most uncertain steps (APPO, arXiv 2606.12384)."""
    axpo: AxpoSettings = setting(AxpoSettings(), idle_unless=with_axpo)
    """Retries of failed rollouts behind a forced tool-call opening (AXPO, arXiv 2605.28774)."""
    commit: CommitSettings = setting(CommitSettings(), idle_unless=with_commit)
    """Calls in place of answers where every rollout failed, round after round."""
    tree_search: TreeSearchSettings = setting(TreeSearchSettings(), idle_unless=with_tree_search)
    """Random expansion of finished rollouts (Tree-GRPO, arXiv 2509.21240)."""
    graft: GraftSettings = setting(GraftSettings(), idle_unless=with_graft)
    """Hybrid-policy rollout (RAPO, arXiv 2603.03078)."""
    prefix: PrefixSettings = setting(PrefixSettings(), idle_unless=with_prefix)
    """Stored trajectories of the task itself: rollouts below their first steps (PrefixRL, arXiv
    2601.18795; BREAD, arXiv 2506.17211), or whole ones in the group (LUFFY, arXiv 2504.14945)."""


def _grown(config: Settings) -> int:
    return int(value_of(config, "buffer.path") == "self")


class GrowSettings(Settings):
    num_best: int = setting(0, ge=0, default_of=_grown)
    """Trajectories of each tree that are added to the buffer, the best by reward; 0 leaves the
    buffer as it is."""
    min_reward: float = 1.0
    """Reward from which a trajectory is worth keeping."""
    capacity: int = setting(20_000, ge=1)
    """Traces of the agent's own that are kept; past it the oldest policy's go first, of these the
    least rewarded."""


class BuildSettings(Settings):
    """Settings of `treegraft buffer build`, whose options count above them; of a .jsonl file as
    buffer.path, `num_best` and `min_reward` count."""

    agent: str = "expert"
    """The agent that answers the training tasks: "expert" (the tasks' scripted expert), the URL of
    an OpenAI-compatible server, or a model (folder, hub id, "pypi:NAME")."""
    model: str | None = None
    """Model of the server; None where it serves only one."""
    num_samples: int = setting(16, ge=1)
    """Attempts per task (RAPO's N)."""
    num_best: int = setting(5, ge=1)
    """Trajectories kept per task, the best by reward (RAPO's K)."""
    min_reward: float = 0.0
    """Only trajectories with a reward above this are kept."""
    num_tasks: int | None = setting(None, ge=1)
    """Training tasks that are answered, the first ones; None for all."""


class BufferSettings(Settings):
    path: str = setting("", retrieval_source=True)
    """The Step-Trace Buffer that grafts come from: a file of `treegraft buffer build` (variables
    are expanded), a .jsonl file of trajectories as `treegraft buffer import` reads them, of which
    the run makes its own buffer, "expert": the tasks' scripted expert solves the training tasks
    before the first update, or "self": empty at first, it holds the agent's own best trajectories
    alone (`buffer.grow`)."""
    build: BuildSettings = BuildSettings()
    encoder: str = "minilm"
    """Encoder of keys into vectors: "minilm" (the papers'), "hashing" (words, no model), a
    sentence-transformers folder or hub id, or "pypi:PACKAGE". A buffer answers to the encoder that
    it was built with."""
    terminal: Literal["skip", "exclude", "allow"] = setting("skip", idle_unless=with_graft)
    """Steps that hold the final answer: "skip" retrieves nothing where one is the nearest,
    "exclude" takes the nearest of the others, "allow" takes it (a reading of the paper; it leaks
    answers of the training tasks)."""
    allow_same_task: bool = True
    """Let traces of the very same task be retrieved."""
    min_similarity: float = setting(
        -1.0,
        ge=-1,
        le=1,
        idle_unless=(
            with_graft,
            Condition(
                "buffer.random_prob", lambda probability: probability < 1, ", so nothing is sought"
            ),
        ),
    )
    """Cosine under which nothing is retrieved."""
    random_prob: float = setting(0.0, ge=0, le=1, idle_unless=with_graft)
    """Probability of a random trace instead of the nearest (RAPO sec. 5.5.2's noise rate p)."""
    num_tries: int = setting(4, ge=1, idle_unless=(with_graft, when("environment.kind")))
    """Nearest steps that are tried in the trajectory's environment, one after another; the first
    whose results come true there is attached."""
    sources: list[str] = []
    """Agents whose traces may be retrieved; empty for all."""
    grow: GrowSettings = setting(GrowSettings(), idle_unless=when("buffer.grow.num_best"))
    """A buffer that learns from the agent's own best trajectories."""
