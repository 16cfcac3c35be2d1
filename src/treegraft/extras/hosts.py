"""What a recipe can mean inside somebody else's trainer: checks and rows that TRL's and verl's
adapters share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from treegraft import Config, SettingError, Tree
from treegraft.parts import LeafRow, leaf_rows, value_of


class Only(NamedTuple):
    """A setting or an argument that has to keep its value, and the reason."""

    name: str
    value: Any
    why: str


class Derived(NamedTuple):
    """An argument of a foreign trainer whose value follows from the recipe."""

    value: Any
    source: str
    """Dotted name of the setting that says it."""


class Host(NamedTuple):
    """Another trainer, and what a recipe must not say inside it."""

    name: str
    own: tuple[Only, ...]
    """Settings of a recipe that this trainer alone refuses other values of."""
    engine: str
    """Who samples there, in words."""
    maker: str
    """What makes its arguments."""

    @property
    def only(self) -> tuple[Only, ...]:
        """The settings that have to keep their value."""
        # The reasons name the trainer.
        common = (Only(one.name, one.value, one.why.format(self.name)) for one in COMMON)
        return (*common, *self.own)

    def check_recipe(self, config: Config) -> None:
        """Raises `SettingError` for a setting that the trainer's loss or loop cannot have."""
        for one in self.only:
            self.refuse_other(one, value_of(config, one.name))
        for name, field in type(config.loss).model_fields.items():
            # A plugin's factor at its default changes no loss.
            default = field.get_default(call_default_factory=True)
            if name not in KNOWN_LOSS:
                why = f"{self.name}'s loss has no such factor"
                self.refuse_other(Only(f"loss.{name}", default, why), getattr(config.loss, name))
        # The default; the trainer has an engine of its own to take its place.
        if config.engine.kind != "native":
            raise SettingError(
                f"engine.kind: got '{config.engine.kind}', expected 'native' inside {self.name},"
                f" {self.engine}.",
                code="host-engine",
            )
        if config.model.path == "tiny" or config.model.path.startswith("shape:"):
            raise SettingError(
                f"model.path: got '{config.model.path}', expected a hub id or a folder inside"
                f" {self.name}, which loads models from files; name a checkpoint of `treegraft sft`"
                " or `train`.",
                code="host-model-path",
            )
        if config.format.thoughts == "drop":
            raise SettingError(
                self._no_contexts("format.thoughts: got 'drop'"), code="host-contexts"
            )
        if not config.run.num_updates:
            raise SettingError(
                f"run.num_updates: got 0, expected 1 or more inside {self.name}.",
                code="host-no-updates",
            )

    def check_alone(self, config: Config, where: str) -> None:
        """Raises `SettingError` for credit that compares all trees of an update, which several
        processes grow.

        Args:
            where: these processes, in words.
        """
        compares = {
            "credit.advantage": config.credit.advantage.startswith("reinforce++"),
            "credit.token_entropy_weight": bool(getattr(config.credit, "token_entropy_weight", 0)),
        }
        for name, does in compares.items():
            if does:
                raise SettingError(
                    f"{name}: got {value_of(config, name)!r}, expected another value inside"
                    f" {self.name} {where}: it compares all trees of an update, and each process"
                    " has its own.",
                    code="host-one-process",
                )

    def check_arguments(
        self,
        only: Iterable[Only],
        derived: Mapping[str, Derived],
        select: Callable[[str], Any],
    ) -> None:
        """Raises `SettingError` for arguments that have no meaning with trees, or that
        contradict the recipe.

        Args:
            only: those that have to keep their default.
            select: returns the value of an argument by its name, None where it is missing.
        """
        for one in only:
            got = select(one.name)
            # Tables that are missing are off, and so are zeros.
            if got or one.value:
                self.refuse_other(one, got)
        for name, (value, source) in derived.items():
            got = select(name)
            # None, 0 and an empty table all mean "off" in these trainers.
            if got != value and (got or value):
                raise SettingError(
                    f"{name}: got {got!r}, expected {value!r} by {source} of the recipe. Change it"
                    f" there; {self.maker} derives {name}.",
                    code="host-differs-from-recipe",
                )

    def refuse_other(self, one: Only, value: Any) -> None:
        """Raises `SettingError` for another value than the required one."""
        if value != one.value:
            raise SettingError(
                f"{one.name}: got {value!r}, expected {one.value!r} inside {self.name}: {one.why}.",
                code="host-setting",
            )

    def rows(self, tree: Tree, config: Config) -> list[LeafRow]:
        """Returns `leaf_rows` of a tree that has room in the trainer.

        Raises:
            SettingError: more leaves than there are rows for, or a token that was sampled at
                another temperature than the trainer scores it at.
        """
        size = config.explore.num_leaves
        temperature = config.rollout.temperature
        if len(tree.leaves) > size:
            raise SettingError(
                f"tree '{tree.group_id}' has {len(tree.leaves)} leaves, expected at most"
                f" explore.num_leaves = {size}: {self.name} fixes the rows of a group. Raise it.",
                code="host-tree-too-wide",
            )
        # One row a leaf: shared tokens are repeated, whose loss weighs the same (law 19).
        rows = leaf_rows([tree], config)
        if len({row.leaf_id for row in rows}) < len(rows):
            got = f"tree '{tree.group_id}': its steps saw contexts of their own"
            raise SettingError(self._no_contexts(got), code="host-contexts")
        for row in rows:
            pairs = zip(row.temperatures, row.loss_mask, strict=True)
            if any(carries and one != temperature for one, carries in pairs):
                raise SettingError(
                    f"tree '{tree.group_id}': a token was sampled at another temperature than"
                    f" rollout.temperature = {temperature:g}, the one that {self.name} scores all"
                    " tokens at.",
                    code="host-other-temperature",
                )
        return rows

    def _no_contexts(self, got: str) -> str:
        return (
            f"{got}, expected trajectories of one row inside {self.name}, which fixes the rows of a"
            " group. Set format.thoughts = 'keep', with a chat template that keeps them, or train"
            " with `treegraft train`."
        )


_NO_TEXTS = "{} learns from what the policy sampled, and imitated texts are none of it"
COMMON = (
    Only("loss.objective", "clip", "{}'s other losses are not those of Treegraft"),
    Only("rollout.max_rounds", 1, "{} fixes the number of prompts of a step"),
    Only("replay.fresh_frac", 1.0, "{} generates every batch anew"),
    Only("sampler.kind", "epochs", "{} chooses the prompts of a step"),
    Only("agent.run", "", "{} fixes the rows of a group, and agents have contexts of their own"),
    Only("loss.graft_coef", 0.0, _NO_TEXTS),
    Only("loss.lesson_coef", 0.0, _NO_TEXTS),
    Only(
        "warmup.num_steps",
        0,
        "{} has no warm-up; run `treegraft sft` first, with its checkpoint as the model",
    ),
)
"""Settings that no such trainer can have another value of."""
KNOWN_LOSS = (
    "aggregation",
    "objective",
    "clip_low",
    "clip_high",
    "kept_low",
    "dual_clip",
    "old_logprobs",
    "engine_ratio_cap",
    "engine_ratio",
    "kl_coef",
    "length_constant",
    "learn_from_truncated",
    "shaping_weight",
    "graft_coef",
    "graft_form",
    "lesson_coef",
    "entropy_coef",
)
"""Settings of [loss] that are derived, used, idle or refused by name; others are of plugins."""
