"""Settings of tasks, samplers, formats and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from treegraft.settings.table import Condition, Settings, has, setting, takes_path, value_of, when


class SearchWorldSettings(Settings):
    hops: list[Annotated[int, Field(ge=1, le=5)]] = setting([1, 2, 3], min_length=1)
    """Question lengths, in facts to look up, in equal shares; 1 to 5 each."""
    num_entities: int = setting(64, ge=8)
    """Entities of a world, one word each; with `words` at most 96."""
    num_relations: int = setting(8, ge=5)
    """Relations of a world, one word each; with `words` at most 16."""
    words: bool = False
    """Ask and answer in plain English with names, for models that know language."""
    thoughts: bool = setting(True, idle_unless=when("tasks.search_world.words"))
    """Whether the scripted expert writes a thought before each step. Without one, going on or
    answering is decided by the token that opens the call or the answer."""
    detour_prob: float = setting(0.0, ge=0, lt=1, retrieval_source=True)
    """How often the scripted expert makes a useless search before a right one, in training
    questions alone: for a buffer of imperfect traces."""
    error_prob: float = setting(0.0, ge=0, le=1, retrieval_source=True)
    """How often the scripted expert ends with a wrong answer, in training questions alone."""
    expert_hops: int = setting(5, ge=1, le=5, retrieval_source=True)
    """Searches after which the scripted expert answers what it has found, in training questions
    alone: of longer questions it makes no right trace."""


class SokobanSettings(Settings):
    size: int = setting(5, ge=3, le=9)
    """Rows and columns of a board, without a frame."""
    num_boxes: int = setting(1, ge=1, le=3)
    """Boxes, and as many goals. The time to search a board grows with the states: some 3 ms with
    one box on 5 x 5 squares, 40 ms with two."""
    num_walls: int = setting(3, ge=0, le=30)
    """Squares that hold a wall."""
    moves: list[Annotated[int, Field(ge=1, le=60)]] = setting([2, 3, 4, 5, 6, 7, 8], min_length=1)
    """Lengths of the shortest solution, in moves, in equal shares."""
    detour_prob: float = setting(0.0, ge=0, lt=1, retrieval_source=True)
    """How often the scripted expert walks to a neighbouring square and back before a move, in
    training boards alone."""
    error_prob: float = setting(0.0, ge=0, lt=1, retrieval_source=True)
    """How often the scripted expert makes another move than a shortest one, in training boards
    alone; it goes on from there, and gives up on a board that it has lost."""


Simplification = Literal[
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
]


class ScienceWorldSettings(Settings):
    games: list[str] = setting(
        [
            "lifespan-longest-lived",
            "lifespan-shortest-lived",
            "lifespan-longest-lived-then-shortest-lived",
            "find-non-living-thing",
        ],
        min_length=1,
    )
    """Names of ScienceWorld's 30 tasks, in equal shares, such as "find-plant" or "boil"; those that
    stand here are the shortest."""
    simplifications: list[Simplification] = ["easy"]
    """What is made easier in each world; "easy" is all of it, empty is nothing."""
    held_out: Literal["dev", "test"] = "dev"
    """The package's variations that are evaluated on; it is trained on the package's train ones."""
    num_warmup: int = setting(16, ge=1)
    """Train variations of each game that are kept for the demonstrations of the warm-up, at most
    half of them. The gold path of each takes the package some 0.3 s."""
    max_actions: int = setting(30, ge=1)
    """Actions after which a world is over."""


class ReasoningGymSettings(Settings):
    generator: str = "chain_sum"
    """Name of a reasoning-gym generator, e.g. "chain_sum", "products", "basic_arithmetic"."""
    params: dict[str, Any] = {}
    """The generator's own parameters."""


class DatasetSettings(Settings):
    train: list[str] = []
    """Files (.jsonl, .json, .csv, .parquet; variables such as $TREEGRAFT_DATA are expanded) or
    "hub:NAME:CONFIG/SPLIT" for training, of which CONFIG and SPLIT may be left out."""
    eval: list[str] = []
    """The same for evaluation; empty holds out the last `num_eval` training rows, a fifth where
    there are no more than those."""
    question_column: str = "question"
    """Column of the question, a text or chat messages ({"role", "content"}); dots and numbers go
    into nested columns ("extra_info.question", "prompt.-1.content")."""
    reference_column: str = "answer"
    """Column of the reference, a string, number or list of accepted answers; dots as above; "" for
    tasks without one, which an environment rewards."""
    category_column: str | None = None
    """Column to break results down by; None for none."""
    reference_after: str | None = setting(None, idle_unless=when("tasks.dataset.reference_column"))
    """Keep only what follows this mark in the reference ("####" for GSM8K); None keeps all."""


class TasksSettings(Settings):
    kind: str = setting(
        "search_world",
        built_in=("search_world", "sokoban", "scienceworld", "arithmetic", "dataset"),
    )
    """"search_world", "sokoban" and "scienceworld" (each for the environment of that name),
    "arithmetic" (a reasoning-gym generator), "dataset", or an import path "package.module:Name"."""
    num_train: int = setting(600, ge=1, ignored_by_eval=True)
    """Training tasks; a data set with fewer rows, or games with fewer variations, use all they
    have."""
    num_eval: int = setting(200, ge=1)
    """Held-out tasks."""
    search_world: SearchWorldSettings = setting(
        SearchWorldSettings(), idle_unless=when("tasks.kind", "search_world")
    )
    sokoban: SokobanSettings = setting(SokobanSettings(), idle_unless=when("tasks.kind", "sokoban"))
    scienceworld: ScienceWorldSettings = setting(
        ScienceWorldSettings(), idle_unless=when("tasks.kind", "scienceworld")
    )
    arithmetic: ReasoningGymSettings = setting(
        ReasoningGymSettings(), idle_unless=when("tasks.kind", "arithmetic")
    )
    dataset: DatasetSettings = setting(DatasetSettings(), idle_unless=when("tasks.kind", "dataset"))
    options: dict[str, Any] = setting({}, idle_unless=takes_path("tasks.kind"))
    """Keyword arguments of a source given by import path."""


_BY_DIFFICULTY = when("sampler.kind", "difficulty")
_REFERS = when("sampler.num_references")


class SamplerSettings(Settings):
    kind: str = setting("epochs", built_in=("epochs", "difficulty"))
    """Which training tasks an update deals: "epochs" (each once, then each once again in another
    order), "difficulty" (those that the agent solves about as often as `target`, as in DOTS), or an
    import path "package.module:Name"."""
    target: float = setting(0.5, ge=0, le=1, idle_unless=_BY_DIFFICULTY)
    """Success rate that a task should have (alpha in the paper): the mean of its rollouts' rewards,
    each taken between 0 and 1."""
    temperature: float = setting(1e-3, gt=0, idle_unless=_BY_DIFFICULTY)
    """How far from the target the dealt tasks may be (tau in the paper): a task's chance is
    proportional to exp(-|rate - target| / temperature)."""
    encoder: str = setting("", idle_unless=_BY_DIFFICULTY)
    """Compares questions, so that a task's rate is predicted from those of tasks like it:
    "hashing", "minilm", a folder, a hub id or "pypi:PACKAGE"; "" compares nothing, and a task that
    was not rolled out yet has the mean rate."""
    attention_temperature: float = setting(
        0.2, gt=0, idle_unless=(_BY_DIFFICULTY, when("sampler.encoder"))
    )
    """How alike tasks must be to tell of each other: a rate weighs as exp(cosine / this)."""
    num_references: int = setting(0, ge=0, idle_unless=_BY_DIFFICULTY)
    """Tasks, drawn evenly, that are rolled out for their rates alone (K, 256 in the paper, with 512
    tasks an update); 0 takes the rates that training itself shows, at no cost."""
    every: int = setting(2, ge=1, idle_unless=(_BY_DIFFICULTY, _REFERS))
    """Updates that one reference set serves (mu in the paper)."""
    decay: float = setting(
        0.8,
        gt=0,
        le=1,
        idle_unless=(_BY_DIFFICULTY, Condition("sampler.num_references", lambda num: num == 0)),
    )
    """What a rollout that training has shown still counts after one more update."""
    options: dict[str, Any] = setting({}, idle_unless=takes_path("sampler.kind"))
    """Keyword arguments of a sampler given by import path."""


def _in_tags(config: Settings) -> bool:
    return bool(value_of(config, "format.kind") == "tags")


def _boxes_in_tags(config: Settings) -> bool:
    return _in_tags(config) and value_of(config, "format.answer") in ("auto", "boxed")


class FormatSettings(Settings):
    kind: Literal["tags", "chat"] = "tags"
    """"tags": think, search, python, result and answer tags, as in the papers; "chat": turns, tool
    calls and results as the model's own chat template writes them."""
    chat_template: str | None = setting(None, idle_unless=when("format.kind", "chat"))
    """Chat template: None takes the model's own or, where that cannot show tools, one of ours that
    fits; "own" insists on the model's; "chatml", "llama3", "gemma" and "plain" are ours; else a
    Jinja file (variables are expanded)."""
    template_options: dict[str, Any] = setting({}, idle_unless=when("format.kind", "chat"))
    """Further variables of the chat template, such as enable_thinking or date_string."""
    system_prompt: str | None = None
    """None composes one from the tools that are on; "" sends none; any other text is used as it
    is."""
    require_think: bool = setting(True, default_of=_in_tags)
    """A step without a thought, <think>...</think>, is a format violation; by default in tags
    only."""
    require_boxed: bool = setting(True, default_of=_boxes_in_tags)
    """An answer without \\boxed{} is a format violation; by default in tags only, where `answer`
    looks for the box."""
    answer: Literal["auto", "boxed", "last_number", "last_line", "whole", "regex"] = "auto"
    """The part of the final text that is the answer: "boxed" the last \\boxed{}, "last_number",
    "last_line", "whole" all of it, "regex" the last match of `answer_pattern`. "auto" is the last
    \\boxed{}, without one the whole text; in chat, where a reference is a number, the last number
    of that text."""
    answer_pattern: str | None = setting(None, idle_unless=when("format.answer", "regex"))
    """Regular expression for "regex", such as "#### (.*)"; the answer is its first group, without
    groups the whole match."""


def _fifth_of_the_limit(config: Settings) -> int:
    return max(1, int(value_of(config, "rollout.max_completion_tokens")) // 5)


class RewardSettings(Settings):
    funcs: list[str] = setting(
        ["hierarchical"],
        built_in=("hierarchical", "exact_match", "f1", "math", "environment", "overlong"),
        min_length=1,
    )
    """"hierarchical" (the papers'), "exact_match", "f1", "math", "environment" (its get_reward),
    "overlong" (DAPO's penalty, 0 to -1, added to the others), or import paths
    "package.module:function"."""
    weights: list[float] | None = setting(None)
    """One factor per function; None means 1 each. The reward is the weighted sum."""

    @property
    def penalty(self) -> float:
        """The weight of "overlong"; 1 without it."""
        return dict(zip(self.funcs, self.weights or (), strict=False)).get("overlong", 1.0)

    accuracy: Literal["auto", "f1", "exact_match", "math"] = setting(
        "auto", idle_unless=has("reward.funcs", "hierarchical")
    )
    """Accuracy inside "hierarchical": "auto" is math for numbers and LaTeX and F1 otherwise, "f1"
    is the released code's."""
    overlong_tokens: int = setting(
        19, ge=1, default_of=_fifth_of_the_limit, idle_unless=has("reward.funcs", "overlong")
    )
    """Tokens before rollout.max_completion_tokens over which "overlong" falls from 0 to -1 (DAPO's
    L_cache); by default a fifth of them."""
    deadline_s: float = setting(60.0, gt=0)
    """Longest wait for the rewards of one tree, in seconds."""
