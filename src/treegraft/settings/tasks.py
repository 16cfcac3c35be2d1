"""Settings of tasks, samplers, formats and rewards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from treegraft.settings.table import Condition, Settings, has, setting, takes_path, value_of, when

MAX_TASKS = 1_000_000
"""Most questions, all of which are there before the first update."""


class SearchWorldSettings(Settings):
    hops: list[Annotated[int, Field(ge=1, le=5)]] = setting([1, 2, 3], min_length=1)
    """Question lengths, in facts to look up, in equal shares; 1 to 5 each."""
    # So many that a guess is rarely right.
    num_entities: int = setting(64, ge=8)
    """Entities of a world, one word each; with `words` at most 96."""
    num_relations: int = setting(8, ge=5)
    """Relations of a world, one word each; with `words` at most 16."""
    words: bool = False
    """Ask and answer in plain English with names, for models that know language."""
    thoughts: bool = setting(True, idle_unless=when("tasks.search_world.words"))
    """Whether the scripted expert writes a thought before each step. Without one, going on or
    answering is decided by the token that opens the call or the answer."""
    bare_thoughts: bool = setting(
        False, idle_unless=Condition("tasks.search_world.words", lambda words: not words)
    )
    """Whether the expert of a world of symbols thinks: "need r2 of e9" before a search, "done"
    before an answer, right or too early, so that the kind of a step is decided in its thought."""
    detour_prob: float = setting(0.0, ge=0, lt=1, retrieval_source=True)
    """How often the scripted expert makes a useless search before a right one, in training
    questions alone: for a buffer of imperfect traces."""
    error_prob: float = setting(0.0, ge=0, le=1, retrieval_source=True)
    """How often the scripted expert ends with a wrong answer, in training questions alone."""
    expert_hops: int = setting(5, ge=1, le=5, retrieval_source=True)
    """Searches after which the scripted expert answers what it has found, in training questions
    alone: of longer questions it makes no right trace."""


class DatasetSettings(Settings):
    train: list[str] = setting([], acts="reads")
    """Files (.jsonl, .json, .csv, .parquet; variables such as $TREEGRAFT_DATA are expanded) or
    "hub:NAME:CONFIG/SPLIT" for training, of which CONFIG and SPLIT may be left out."""
    eval: list[str] = setting([], acts="reads")
    """The same for evaluation; without any, the last `num_eval` training rows, a fifth where
    there are no more than those."""
    question_column: str = setting("question", acts="nothing")
    """Column of the question, a text or chat messages ({"role", "content"}); dots and numbers go
    into nested columns ("extra_info.question", "prompt.-1.content")."""
    reference_column: str = setting("answer", acts="nothing")
    """Column of the reference, a string, number or list of accepted answers; dots as above; "" for
    tasks without one, which an environment rewards."""
    category_column: str | None = setting(None, acts="nothing")
    """Column to break results down by; None for none."""
    reference_after: str | None = setting(
        None, acts="nothing", idle_unless=when("tasks.dataset.reference_column")
    )
    """Use only what follows this mark in the reference ("####" for GSM8K); None for all."""


class TasksSettings(Settings):
    kind: str = setting("search_world", seam="tasks")
    """"search_world", "arithmetic" (a reasoning-gym generator), "dataset", a name that an
    extension brings, or an import path "package.module:Name"."""
    num_train: int = setting(600, ge=1, le=MAX_TASKS, ignored_by_eval=True)
    """Training tasks; a data set with fewer rows, or games with fewer variations, use all they
    have."""
    num_eval: int = setting(200, ge=1, le=MAX_TASKS)
    """Held-out tasks."""
    search_world: SearchWorldSettings = setting(
        SearchWorldSettings(), idle_unless=when("tasks.kind", "search_world")
    )
    dataset: DatasetSettings = setting(DatasetSettings(), idle_unless=when("tasks.kind", "dataset"))
    options: dict[str, Any] = setting({}, acts="imports", idle_unless=takes_path("tasks.kind"))
    """Keyword arguments of a source given by import path."""
    expert_options: dict[str, Any] = setting(
        {}, acts="imports", idle_unless=takes_path("tasks.kind"), retrieval_source=True
    )
    """Further ones, which change nothing but what its expert does."""


class SamplerSettings(Settings):
    kind: str = setting("epochs", seam="sampler")
    """Which training tasks an update deals: "epochs" (each once, then each once again in another
    order), a name that an extension brings, or an import path "package.module:Name"."""
    options: dict[str, Any] = setting({}, acts="imports", idle_unless=takes_path("sampler.kind"))
    """Keyword arguments of a sampler given by import path."""


_in_chat = when("format.kind", "chat", "renderer")


def _in_tags(config: Settings) -> bool:
    return bool(value_of(config, "format.kind") == "tags")


def _boxes_in_tags(config: Settings) -> bool:
    return _in_tags(config) and value_of(config, "format.answer") in ("auto", "boxed")


class FormatSettings(Settings):
    kind: str = setting("tags", seam="format")
    """"tags": think, search, python, result and answer tags, as in the papers; "chat": turns, tool
    calls and results as the model's own chat template writes them; "renderer": the same for the
    families of docs/templates.md, by the package renderers; a name that an extension brings, or an
    import path."""
    chat_template: str | None = setting(None, acts="imports", idle_unless=_in_chat)
    """Chat template: None for the model's own or, where that cannot show tools, one of ours that
    fits; "own" insists on the model's; "chatml", "llama3", "gemma", "mistral" and "plain" are ours;
    else a Jinja file (variables are expanded)."""
    template_options: dict[str, Any] = setting({}, acts="imports", idle_unless=_in_chat)
    """Further variables of the chat template, such as enable_thinking or date_string; for
    "renderer" also `renderer`, the name of one."""
    system_prompt: str | None = setting(None, acts="nothing")
    """None composes one from the tools that are on; "" sends none; any other text is used as it
    is."""
    require_think: bool = setting(True, default_of=_in_tags)
    """A step without a thought, <think>...</think>, is a format violation; by default in tags
    only."""
    thoughts: Literal["auto", "keep", "drop"] = "auto"
    """Whether later steps see the thoughts of earlier ones: "keep" or "drop", which makes prompts
    short and trains each step in the context that it saw; "auto" does as the model's chat template
    does, and keeps them in tags."""
    require_boxed: bool = setting(True, default_of=_boxes_in_tags)
    """An answer without \\boxed{} is a format violation; by default in tags only, where `answer`
    looks for the box."""
    answer: Literal["auto", "boxed", "last_number", "whole", "regex"] = "auto"
    """The part of the final text that is the answer: "boxed" the last \\boxed{}, "last_number",
    "whole" all of it, "regex" the last match of `answer_pattern`. "auto" is the last
    \\boxed{}, without one the whole text; in chat, where a reference is a number, the last number
    of that text."""
    answer_pattern: str | None = setting(
        None, acts="nothing", idle_unless=when("format.answer", "regex")
    )
    """Regular expression for "regex", such as "#### (.*)"; the answer is its first group, without
    groups the whole match."""


class RewardSettings(Settings):
    funcs: list[str] = setting(["hierarchical"], seam="reward", min_length=1)
    """"hierarchical" (the papers'), "exact_match", "f1", "math", "environment" (its get_reward),
    "overlong" (DAPO's penalty, which falls from 0 to -1 over the last fifth of
    rollout.max_completion_tokens, added to the others), or import paths
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
    # Long enough for a judge over the network, short enough not to stop a run.
    deadline_s: float = setting(60.0, gt=0)
    """Longest wait for the rewards of one tree, in seconds."""
