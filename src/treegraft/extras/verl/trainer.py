"""verl's synchronous trainer with the advantages, weights and shaping of trees."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transfer_queue
import verl
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

from treegraft import SettingError, load_config
from treegraft.extras.verl import check_version
from treegraft.extras.verl.arguments import TRAINER, check_arguments, check_recipe
from treegraft.extras.verl.rows import ADVANTAGES, FACTS, Facts, factors, minibatches
from treegraft.extras.verl.server import use_top_servers
from treegraft.parts import errors


@register_trainer(TRAINER)
class TreeTrainer(PPOTrainerSync):  # type: ignore[misc]
    """Trains on trees: `trainer.v1.trainer_mode=treegraft`, with `treegraft.recipe`.

    A minibatch has whole trees. verl's loss, optimiser, weights and checkpoints stay its own.
    """

    def __init__(self, config: Any) -> None:
        """Reads the recipe and compares it with verl's arguments.

        Raises:
            SettingError: another version of verl, no recipe, or a setting or argument that cannot
                mean anything with trees, or that contradicts the other side.
        """
        check_version(verl.__version__)
        select = partial(OmegaConf.select, config)
        recipe = select("treegraft.recipe")
        if recipe is None:
            raise SettingError(
                "treegraft.recipe: got none, expected the path of a recipe; start with"
                " $(treegraft verl-args RECIPE).",
                code="verl-without-recipe",
            )
        self.recipe = load_config(recipe, list(select("treegraft.changes") or ()))
        check_recipe(self.recipe)
        # Before verl starts any worker, for minutes.
        check_arguments(self.recipe, select)
        with open_dict(config):
            # Other machines need not see the file.
            config.treegraft.settings = self.recipe.model_dump_json().replace("${", r"\${")
            # By this name verl recognises a synchronous trainer.
            config.trainer.v1.trainer_mode = "sync"
        use_top_servers()
        super().__init__(config)

    # ------------------------------------------------------------------ minibatches

    @property
    def _rows_of_minibatch(self) -> int:
        """On all ranks, padding included."""
        actor = self.config.actor_rollout_ref.actor
        rollout = self.config.actor_rollout_ref.rollout
        return int(actor.ppo_mini_batch_size) * int(rollout.n)

    def _balance_batch(self, batch: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Returns the batch in an order in which each minibatch has whole trees and each rank rows
        of about as many tokens; verl's own mixes the rows of all minibatches.

        Raises:
            EngineError: no leaf of any tree counts.
        """
        if not len(batch):
            raise errors.EngineError(
                f"step {self.global_steps}: no leaf of any tree counts; all failed for a reason of"
                " ours. See the workers' logs.",
                code="verl-all-failed",
            )
        size = self._rows_of_minibatch
        rollout = self.config.actor_rollout_ref.rollout
        # verl would pad to the number of ranks alone.
        whole = int(self.config.data.train_batch_size) * int(rollout.n)
        batch = upsample_batch_to_divisible_size(batch, whole, self.tokenizer.eos_token_id)
        workload = calculate_workload(torch.tensor([tag["seq_len"] for tag in batch.tags]))
        ranks = self._num_ranks()
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for rows in minibatches(batch.keys, batch.tags, size, int(rollout.n)):
            shares = get_seqlen_balanced_partitions(workload[rows], ranks, equal_size=True)
            for part, share in zip(parts, shares, strict=True):
                part += [rows[place] for place in share]
        batch.reorder([row for part in parts for row in part])
        return batch

    def _num_ranks(self) -> int:
        """Over which verl divides a batch."""
        group = self.actor_rollout_wg
        if "actor" not in group._dispatch_info:
            group._dispatch_info["actor"] = group._query_dispatch_info("actor")
        return int(max(group._dispatch_info["actor"])) + 1

    def _minibatch_of(self, num: int) -> list[int]:
        """Returns [num] the minibatch of each row of a batch in the order of `_balance_batch`."""
        ranks = self._num_ranks()
        size = self._rows_of_minibatch
        own = num // ranks
        return [(place % own) // (size // ranks) for place in range(num)]

    # ------------------------------------------------------------------ advantages

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Writes the advantages of trees into the queue, and takes ln(1 + m F) off the old
        log-probabilities: verl's ratio is then (1 + m F) ρ, which its clip acts on (RAPO, arXiv
        2603.03078, eq. 8 and 11)."""
        fields = [ADVANTAGES, "extra_fields", "response_mask", "old_log_probs", "rollout_log_probs"]
        data = transfer_queue.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        facts = [
            None if tag.get("is_padding", False) else Facts(**extra[FACTS])
            for tag, extra in zip(batch.tags, list(data["extra_fields"]), strict=True)
        ]
        # The recipe decides whose probabilities the ratio is taken over.
        by_engine = self.recipe.loss.old_logprobs == "engine"
        old = rows_of(data["rollout_log_probs" if by_engine else "old_log_probs"])
        masks = rows_of(data["response_mask"])
        advantages = []
        shifted = []
        for own, mask, before, one, scale in zip(
            rows_of(data[ADVANTAGES]), masks, old, facts, self._scales(facts), strict=True
        ):
            # verl's padding has the columns of another row, but one token.
            advantages.append(torch.zeros_like(before) if one is None else own * mask * scale)
            shaping = before.new_tensor(1.0 if one is None else one.shaping)
            shifted.append(before - shaping.log())
        columns = {"advantages": advantages, "returns": advantages, "old_log_probs": shifted}
        nested = {
            name: torch.nested.as_nested_tensor(rows, layout=torch.jagged)
            for name, rows in columns.items()
        }
        return transfer_queue.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict(nested, batch_size=len(batch)),
        )

    def _scales(self, facts: Sequence[Facts | None]) -> list[float]:
        """Returns the factor of each row's advantages."""
        numbers = self._minibatch_of(len(facts))
        found = [0.0] * len(facts)
        for number in set(numbers):
            places = [place for place, one in enumerate(numbers) if one == number]
            own = [facts[place] for place in places]
            scale = factors(own, self.recipe, num_rows=self._rows_of_minibatch)
            for place, factor in zip(places, scale, strict=True):
                found[place] = factor
        return found

    # ------------------------------------------------------------------ after a step

    def on_step_end(self) -> None:
        """Moves the weights, as verl does; records the step's trees, whose metrics verl logs as
        tree/..."""
        super().on_step_end()
        found = self.agent_loop_manager.learned(self.global_steps)
        self._pending_sync_metrics = {f"tree/{name}": value for name, value in found.items()}


def rows_of(column: Any) -> list[Tensor]:
    """Returns the rows of a column of verl's queue."""
    return list(column.unbind(0))
