"""Parts of your own evaluations: an agent, its scored trees, and their files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from treegraft.assemble import Parts
from treegraft.core.files import file_checksum
from treegraft.core.removed import instead
from treegraft.core.types import Task, Tree
from treegraft.evals.evaluate import independent_trees
from treegraft.rollout.formats.markup import boxed
from treegraft.rollout.loop import Watch
from treegraft.rollout.measure import pass_at_k
from treegraft.runs.display import display_on
from treegraft.runs.open import open_checkpoint
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_json import parse_tree, tree_to_json
from treegraft.settings.config import Config, settings_with
from treegraft.settings.load import refuse_sampling
from treegraft.tasks import scoring
from treegraft.tasks.fields import nested_columns
from treegraft.tasks.reward_calls import WrittenText
from treegraft.tasks.rewards import RewardScorer, answer_of, answer_reward

__all__ = [
    "Parts",
    "RunFolder",
    "Subject",
    "answer_of",
    "boxed",
    "display_on",
    "parse_tree",
    "pass_at_k",
    "suite_scorer",
    "tree_to_json",
]


def suite_scorer(deadline_s: float, written_text: WrittenText) -> RewardScorer:
    """Returns the scorer of evaluated trees: reward parts "em", "f1" and "match", and whether the
    answer is correct.

    em and f1 are SQuAD's, f1 with Chinese characters as words; match is `is_correct`: exact match,
    or equal mathematics. The reward is match.
    """
    return RewardScorer(
        [
            ("em", answer_reward(scoring.exact_match_squad), 0.0),
            ("f1", answer_reward(scoring.f1_characters), 0.0),
            ("match", answer_reward(scoring.is_correct), 1.0),
        ],
        written_text=written_text,
        deadline_s=deadline_s,
    )


@dataclass(frozen=True, slots=True)
class Subject:
    """An agent that is evaluated on tasks of the caller's."""

    config: Config
    model_path: Path | str | None
    """The place of its model; None for the one that `config` names."""
    watch: Watch = field(default_factory=Watch)
    """The waits under way."""

    @classmethod
    def of(
        cls, checkpoint: Path | str | None, config: Config | None, overrides: Sequence[str]
    ) -> Subject:
        """Returns an agent by its checkpoint or configuration, as `evaluate_checkpoint` takes them.

        Raises:
            CheckpointError: no such checkpoint.
            SettingError: a wrong override, or one that has no effect on greedy trajectories.
        """
        config, model_path = open_checkpoint(checkpoint, config, overrides)
        if config.eval.greedy:
            reason = "trajectories are greedy; add eval.greedy=false"
            refuse_sampling(overrides, reason, "eval.num_samples")
        return cls(config, model_path)

    def facts(self) -> dict[str, Any]:
        """Returns everything that a greedy trajectory depends on, by name: settings, and the
        weights by their checksums."""
        values = self.that_count(
            {
                name: value
                for name, value in nested_columns(self.config.model_dump(mode="json"))
                if not isinstance(value, Mapping)
            }
        )
        weights = str(self.model_path or self.config.model.path)
        if isinstance(self.model_path, Path):
            # Their contents, since a training that goes on may write others under the same name.
            kinds = (".safetensors", ".bin", ".gguf")
            files = sorted(file for file in self.model_path.iterdir() if file.suffix in kinds)
            weights = " ".join(f"{file.name}:{file_checksum(file)[:16]}" for file in files)
        return values | {"weights": weights}

    @staticmethod
    def that_count(facts: Mapping[str, Any]) -> dict[str, Any]:
        """Returns these facts, which an earlier version may have written, without the settings that
        are gone or change no trajectory."""
        # A suite that was stopped goes on after a change of such settings.
        no_matter = settings_with("ignored_by_eval", "same_answers")
        return {
            name: value
            for name, value in facts.items()
            if not (name.startswith(no_matter) or instead(name))
        }

    @asynccontextmanager
    async def opened(self, tasks: Sequence[Task]) -> AsyncIterator[Parts]:
        """Holds the agent's parts, which score as `suite_scorer` does.

        Raises:
            DataError: the prompt of one of `tasks` does not fit.
            TreegraftError: a part that cannot be made.
        """
        async with Parts.build(self.config, model_path=self.model_path) as parts:
            parts.check_prompts(tasks)
            scorer = suite_scorer(self.config.reward.deadline_s, parts.format.written_text)
            yield replace(parts, scorer=scorer)

    async def grow(
        self,
        parts: Parts,
        tasks: Sequence[Task],
        sampling: tuple[int, float],
        on_tree: Callable[[int, Tree], None],
    ) -> None:
        """Grows a tree of independent trajectories for each task.

        Args:
            parts: what `opened` holds.
            sampling: trajectories of each task, and their temperature, 0 for greedy ones.
            on_tree: called with the number of trees that are done and the last of them.

        Raises:
            EngineError: every trajectory failed.
        """
        await independent_trees(
            parts,
            tasks,
            sampling,
            pass_name="suite",
            group_prefix="eval",
            watch=self.watch,
            on_tree=on_tree,
        )
