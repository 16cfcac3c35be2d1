"""The settings tree: defaults here, then the recipe (TOML), then overrides (`learn.lr=1e-5`).

`treegraft.settings.load` reads and checks it; the meaning of a setting is the text under it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from treegraft.core.errors import SettingError
from treegraft.core.registry import Entry, extensions, loaded
from treegraft.settings.explore import BufferSettings, ExploreSettings, reads_buffer
from treegraft.settings.policy import (
    CreditSettings,
    EngineSettings,
    LearnSettings,
    LossSettings,
    ModelSettings,
    PublishSettings,
    WarmupSettings,
)
from treegraft.settings.table import (
    Setting,
    Settings,
    by_model,
    has,
    holding,
    joined,
    setting,
    walk,
    when,
)
from treegraft.settings.tasks import FormatSettings, RewardSettings, SamplerSettings, TasksSettings
from treegraft.settings.tools import AgentSettings, EnvironmentSettings, ToolsSettings


class RunSettings(Settings):
    name: str | None = setting(None, acts="nothing", ignored_by_eval=True)
    """Folder name of the run; None makes one from recipe, seed and time. One that exists is refused
    unless resuming."""
    dir: str = setting("runs", acts="writes", same_answers=True)
    """Where run folders are made."""
    # Integers of TOML and of most readers of JSON end there.
    seed: int = setting(0, ge=0, lt=2**63)
    """Seed of everything: tasks, noise, weights of a fresh tiny model."""
    num_updates: int = setting(20, ge=0, resumable=True, ignored_by_eval=True)
    """Updates to train; 0 warms up and evaluates only."""
    max_calls: int | None = setting(None, ge=1, resumable=True, ignored_by_eval=True)
    """Executed tool calls in training, replayed ones included, from which on no update begins; None
    for no limit. The run ends with the first limit that is reached, num_updates included."""
    max_tokens: int | None = setting(None, ge=1, resumable=True, ignored_by_eval=True)
    """The same for sampled tokens."""
    tasks_per_update: int = setting(12, ge=1, ignored_by_eval=True)
    """Trees grown in one update."""
    # A count changes sums: law 12 is about one.
    num_threads: int | None = setting(None, ge=1, le=1024)
    """CPU threads for torch; None leaves torch's own choice. Reproducibility is promised for one
    count."""

    def spent(self, done: tuple[int, int]) -> dict[str, float]:
        """Returns the share of each limit of (calls, tokens) that is set, by its name."""
        shares: dict[str, float] = {}
        if self.max_calls:
            shares["max_calls"] = done[0] / self.max_calls
        if self.max_tokens:
            shares["max_tokens"] = done[1] / self.max_tokens
        return shares


class RolloutSettings(Settings):
    temperature: float = setting(1.0, gt=0, ignored_by_eval=True)
    """Sampling temperature in training."""
    # The tiny model's words are whole tokens, a language model's are not.
    max_completion_tokens: int = setting(96, ge=1, default_of=by_model(tiny=96, full=512))
    """Limit of a trajectory after its prompt, tool results included, in tokens; by default 96 for
    the "tiny" model, 512 for a language model."""
    max_agent_steps: int = setting(8, ge=1)
    """Limit of a trajectory, in steps."""
    max_tool_calls: int = setting(6, ge=0)
    """Limit of a trajectory, in tool calls."""
    # So long that only what hangs reaches it: a slow agent is no failure.
    deadline_s: float = setting(600.0, gt=0, same_answers=True)
    """Longest life of one trajectory, in seconds; past it its leaf has failed."""
    max_rounds: int = setting(1, ge=1, ignored_by_eval=True)
    """Rounds of run.tasks_per_update tasks that an update may sample: groups whose rewards are all
    equal are replaced by those of further tasks (DAPO's dynamic sampling); 1 samples once. This
    also drops groups that credit.attribution = "states", credit.advantage = "reinforce++" or
    loss.graft_coef would still learn from."""
    # A bound on open environments and trees in memory; the engine has its own.
    max_live_trees: int = setting(64, ge=1)
    """Trees that grow at once."""


class ReplaySettings(Settings):
    fresh_frac: float = setting(1.0, gt=0, le=1)
    """Share of run.tasks_per_update that is sampled anew (sigma, 0.5 in the paper); the rest are
    groups of earlier updates. 1 replays none."""

    def num_replayed(self, size: int) -> int:
        """Returns how many of an update's `size` groups are of earlier updates."""
        return size - max(1, round(self.fresh_frac * size))


class EvalSettings(Settings):
    every: int = setting(5, ge=0, resumable=True, ignored_by_eval=True)
    """Evaluate after each so many updates; 0 only where `at_start` and `at_end` say so."""
    # A gain is measured against this one.
    at_start: bool = setting(True, ignored_by_eval=True)
    """Evaluate before the first update."""
    at_end: bool = setting(True, resumable=True, ignored_by_eval=True)
    """Evaluate after the last update."""
    greedy: bool = setting(True, same_answers=True)
    """Measure eval/accuracy: one greedy trajectory per task. `treegraft eval suite` uses this one
    where it is on, else the sampled ones."""
    num_samples: int = setting(1, ge=0, same_answers=True)
    """Sampled trajectories per task, for eval/accuracy_sampled and eval/pass_at_k with k up to
    this; 0 for none."""
    # A suite notes the temperature that it came to: 0 where it is greedy.
    temperature: float = setting(1.0, gt=0, idle_unless=when("eval.num_samples"), same_answers=True)
    """Temperature of the sampled trajectories; 1 measures the policy itself."""
    top_k: int = setting(0, ge=0, idle_unless=when("eval.num_samples"))
    """Sample from the so many most likely tokens; 0 for all. First of the two limits."""
    top_p: float = setting(1.0, gt=0, le=1, idle_unless=when("eval.num_samples"))
    """Sample from the fewest tokens that have this probability together, after `top_k`; 1 for
    all."""
    repetition_penalty: float = setting(1.0, gt=0)
    """Divides the positive logits of tokens that are on the path already, and multiplies the
    negative ones; in greedy trajectories too. 1 for none."""
    max_completion_tokens: int | None = setting(None, ge=1, follows=True)
    """As in [rollout]; None for the value there."""
    max_tool_calls: int | None = setting(None, ge=0, follows=True)
    """As in [rollout]; None for the value there."""


class CheckpointSettings(Settings):
    every: int = setting(5, ge=0, resumable=True)
    """Write a checkpoint after each so many updates, and at the end; 0: at the end alone, and
    where a run is interrupted."""
    keep: int = setting(2, ge=1, resumable=True)
    """How many of the latest to keep; the best by held-out accuracy stays too."""


class TrackSettings(Settings):
    trackers: list[str] = setting([], seam="tracker", resumable=True, ignored_by_eval=True)
    """Any of "tensorboard", "trackio", "wandb" and "mlflow", or import paths
    "package.module:Tracker"; metrics.jsonl is always written."""
    # On: replay, the viewer and reports read them.
    record_trees: bool = True
    """Write whole trees to trees/."""
    keep_trees: int | None = setting(
        None, ge=1, idle_unless=when("track.record_trees"), resumable=True, ignored_by_eval=True
    )
    """The latest updates whose trees stay, for long runs; those of evaluations stay. None for
    all."""


class Config(Settings):
    """The root of the settings tree."""

    # First, as a file of TOML begins with what is in no table.
    health: dict[str, Literal["off"]] = setting(
        {}, seam="warning", resumable=True, ignored_by_eval=True
    )
    """Warnings that are not given: health.truncated = "off". docs/warnings.md has their names."""
    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    tasks: TasksSettings = TasksSettings()
    format: FormatSettings = FormatSettings()
    tools: ToolsSettings = ToolsSettings()
    environment: EnvironmentSettings = setting(
        EnvironmentSettings(), idle_unless=when("environment.kind")
    )
    agent: AgentSettings = AgentSettings()
    reward: RewardSettings = setting(RewardSettings(), same_answers=True)
    explore: ExploreSettings = setting(ExploreSettings(), ignored_by_eval=True)
    buffer: BufferSettings = setting(
        BufferSettings(), idle_unless=(reads_buffer,), ignored_by_eval=True
    )
    rollout: RolloutSettings = RolloutSettings()
    sampler: SamplerSettings = setting(SamplerSettings(), ignored_by_eval=True)
    replay: ReplaySettings = setting(ReplaySettings(), ignored_by_eval=True)
    eval: EvalSettings = EvalSettings()
    engine: EngineSettings = EngineSettings()
    publish: PublishSettings = setting(PublishSettings(), idle_unless=when("engine.kind", "vllm"))
    credit: CreditSettings = setting(CreditSettings(), ignored_by_eval=True)
    loss: LossSettings = setting(LossSettings(), ignored_by_eval=True)
    learn: LearnSettings = setting(LearnSettings(), ignored_by_eval=True)
    warmup: WarmupSettings = setting(
        WarmupSettings(), idle_unless=when("warmup.num_steps"), ignored_by_eval=True
    )
    checkpoint: CheckpointSettings = setting(CheckpointSettings(), ignored_by_eval=True)
    track: TrackSettings = setting(TrackSettings(), same_answers=True)


def _brought(entry: Entry) -> Iterator[tuple[str, type[Settings]]]:
    """The settings of an entry: each the dotted name of a table, and a class whose fields join
    it."""
    if "table" in entry.brings:
        # Only these three have tables of their own names.
        above, condition = {
            "explorer": ("explore", has("explore.explorers", entry.name)),
            "tool": ("tools", has("tools.use", entry.name)),
            "tasks": ("tasks", when("tasks.kind", entry.name)),
        }[entry.seam]
        yield above, holding(entry.name, entry.brings["table"], condition)
    for name, table in entry.brings.get("settings", {}).items():
        yield name, loaded(table)


def _with_extensions(core: type[Settings]) -> tuple[type[Settings], tuple[str, ...]]:
    """The root with the settings of extensions, and a sentence for each one that was left out."""
    problems = list(extensions().problems)
    # One that cannot be joined must not keep the others out.
    for entry in extensions().entries:
        try:
            for name, table in _brought(entry):
                core = joined(core, name, table, __name__)
        except SettingError as error:
            problems.append(f"extension '{entry.owner}': {error}")
    return core, tuple(problems)


if TYPE_CHECKING:
    LEFT_OUT: tuple[str, ...] = ()
else:
    # Settings of extensions are declared next to the code that reads them.
    Config, LEFT_OUT = _with_extensions(Config)
    for _found in walk(Config):
        if _found.table is not None and _found.table.__module__ == __name__:
            # Where pickle looks for it.
            globals()[_found.table.__name__] = _found.table


Fact = Literal["resumable", "ignored_by_eval", "same_answers", "retrieval_source", "only_for"]


@functools.cache
def tables_and_settings() -> Mapping[str, Setting]:
    """Returns every table and setting by its dotted name, in the order of the tree."""
    return {found.name: found for found in walk(Config)}


@functools.cache
def known_settings() -> Mapping[str, Setting]:
    """Returns every setting by its dotted name, in the order of the tree."""
    return {name: found for name, found in tables_and_settings().items() if found.table is None}


@functools.cache
def settings_with(*facts: Fact) -> tuple[str, ...]:
    """Returns the dotted names of the settings with one of these facts; tables end with a dot."""
    names: list[str] = []
    for name, found in tables_and_settings().items():
        if any(getattr(found.facts, fact) for fact in facts):
            names.append(name if found.table is None else f"{name}.")
    return tuple(names)
