"""TRL's trainer with trees by a recipe in place of its own rollouts."""

from __future__ import annotations

import tempfile
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from treegraft import Config, Session, SettingError, Tree, load_config, read_trees
from treegraft.extras.trl.arguments import check_arguments, check_recipe, grpo_config
from treegraft.extras.trl.models import loaded_dtype, lora_config, same_tokenizer, with_model
from treegraft.extras.trl.rows import (
    Row,
    coefficients,
    own_sums,
    rollout_fields,
    row_advantages,
    row_shaping,
    shaped_at_one,
    tree_rows,
    trl_coefficients,
)
from treegraft.extras.trl.vllm import Colocated
from treegraft.parts import losses, measuring, served

OBJECTS = {"train_dataset": "tasks", "reward_funcs": "rewards", "tools": "tools"}
"""Arguments of GRPOTrainer that may take the place of a recipe's settings, and what `Session` calls
them."""
REFUSED = {
    "reward_processing_classes": "[reward] of the recipe says it",
    "environment_factory": "[environment] of the recipe says it",
    "rollout_func": "[explore] of the recipe says it",
    "eval_dataset": "trees are for training; measure a checkpoint with `treegraft eval`",
    "quantization_config": "the engine needs the plain model's weights",
}
"""Arguments of GRPOTrainer that mean nothing with a recipe, and why."""


def tree_reward(*, reward: Sequence[float | None], **_: Any) -> list[float | None]:
    """Returns the rewards that the recipe's functions gave; None for a leaf that failed."""
    return list(reward)


class TreeGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """Trees by a recipe inside TRL's loop: its optimiser, loss, accelerate, DDP, LoRA and
    checkpoints; the tasks, tools, rewards, rollouts and per-token advantages are the recipe's.

    At each generation a native engine or TRL's vLLM gets the trainer's weights, a tree is grown for
    each prompt, and its leaves are the rows of the prompt. The trees are written to
    args.output_dir, which `treegraft view` shows.
    """

    beta: float
    """Weight of the KL term."""

    def __init__(
        self,
        model: Any,
        recipe: Config | Mapping[str, Any] | str | Path,
        args: GRPOConfig | None = None,
        *,
        processing_class: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        peft_config: Any = None,
        **others: Any,
    ) -> None:
        """Makes the recipe's parts and TRL's.

        Args:
            model: a name, or a transformers or peft model that was loaded from files; it goes
                before model.path and model.dtype of the recipe. None means those.
            args: of `grpo_config`; None makes them.
            processing_class: a tokenizer equal to the recipe's; None means that.
            others: train_dataset, reward_funcs and tools as in GRPOTrainer, for a recipe without
                [tasks] train, [reward] funcs and [tools] use.
            callbacks, optimizers, peft_config: as in GRPOTrainer; model.lora of the recipe makes
                a peft_config too.

        Raises:
            SettingError: what the recipe says already, or what has no meaning with trees.
        """
        self._objects = _objects(others)
        _refuse_others(others)
        self.recipe = config = with_model(_recipe(recipe, self._objects), model)
        check_recipe(config)
        args = grpo_config(config) if args is None else args
        check_arguments(config, args)
        if model is None or isinstance(model, str):
            model = config.model.path
            given = dict(args.model_init_kwargs or {})
            adapts = bool(config.model.lora.rank or peft_config)
            dtype = loaded_dtype(given, config, adapts=adapts)
            args.model_init_kwargs = {**given, "dtype": dtype}
        # Closed by `close`, by the end of `train`, or with the trainer.
        self._held = ExitStack()
        self._asks_vllm = bool(args.use_vllm)
        self._rows: list[Row] = []
        self._of_update: list[Tree] = []
        self.trees: list[Tree] = []
        """This process's trees of the last generation."""
        # Also where `train` is never called.
        weakref.finalize(self, self._held.close)
        self._open()
        tasks = self._check_tasks(self._session.tasks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(
                model=model,
                args=args,
                train_dataset=Dataset.from_list(tasks),
                reward_funcs=tree_reward,
                rollout_func=self._roll_out,
                processing_class=same_tokenizer(processing_class, self._session.tokenizer),
                callbacks=callbacks,
                optimizers=optimizers,
                peft_config=lora_config(config, peft_config),
            )
        # After accelerate is set up, which knows how weights are divided.
        self._refuse_shards()
        if self._asks_vllm:
            self._join_vllm()
            return
        # A model of another shape is refused here, before any work.
        self._session.sync_weights(0, self._weights())

    # ------------------------------------------------------------------ begin and end

    def _open(self) -> None:
        engine = None
        if self._asks_vllm:
            tokenizer: Any = AutoTokenizer.from_pretrained(self.recipe.model.path)
            settings = self.recipe.engine
            engine = served.ServerEngine(
                None,
                tokenizer,
                end_ids=(),
                capacity=settings.max_rows,
                deadline_s=settings.deadline_s,
            )
        self._session = self._held.enter_context(
            Session(self.recipe, engine=engine, learns=False, **self._objects)
        )
        self._is_open = True
        self._published = -1

    def _join_vllm(self) -> None:
        """Has the engine ask the vLLM that TRL has by now, and gives that the weights anew."""
        self._last_loaded_step = -1
        engine: Any = self._session.engine
        engine.server = Colocated(self.vllm_generation.llm, self.accelerator.device)
        self._held.callback(engine.server.close)
        engine.max_context, engine.end_ids = engine.server.max_context, set(self.eos_token_ids)

    def close(self) -> None:
        """Ends the engine and the tools; `train` does so at its end, and opens them again."""
        self._held.close()
        self._is_open = False

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as TRL's trainer does."""
        if not self._is_open:
            self._open()
            if self._asks_vllm:
                self._join_vllm()
        try:
            return super().train(*args, **kwargs)
        finally:
            self.close()

    def _check_tasks(self, tasks: Sequence[Any]) -> list[dict[str, Any]]:
        needed = self.recipe.run.tasks_per_update
        if len(tasks) < needed:
            raise SettingError(
                f"run.tasks_per_update: got {needed}, expected at most {len(tasks)}, the training"
                " tasks of the recipe: TRL gives a step each task once.",
                code="tasks-too-few-for-update",
            )
        return [{"prompt": task.question, "task": place} for place, task in enumerate(tasks)]

    def _refuse_shards(self) -> None:
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if not (self.is_fsdp_enabled or (plugin is not None and plugin.zero_stage == 3)):
            return
        if not self._asks_vllm:
            raise SettingError(
                "FSDP or DeepSpeed ZeRO-3: got weights in shards, expected whole ones on each"
                " process (DDP, ZeRO-1 or ZeRO-2): the native engine is given the trainer's"
                " weights. TRL's vLLM takes shards: use_vllm=True.",
                code="trl-sharded",
            )

    # ------------------------------------------------------------------ trees

    @property
    def _number(self) -> int:
        """Of the update, from 1 on: a generation and its passes."""
        return int(self.state.global_step) // int(self.num_iterations) + 1

    def _publish(self) -> None:
        if self._asks_vllm:
            generation = self.vllm_generation
            step = self.state.global_step
            # As TRL does before it samples; what slept has lost its weights.
            asleep = getattr(generation, "_llm_weights_sleeping", False)
            if step != self._last_loaded_step or asleep:
                generation.sync_weights()
                self._last_loaded_step = step
            self.accelerator.wait_for_everyone()
            self._session.sync_weights(self._number - 1)
        elif self.state.global_step != self._published:
            self._session.sync_weights(self._number - 1, self._weights())
            self._published = self.state.global_step

    def _weights(self) -> Any:
        """For the native engine, in its type: that of the model, or the rounding of float32."""
        plain = self.accelerator.unwrap_model(self.model)
        dtype = getattr(torch, self.recipe.model.dtype)
        # Adapters are merged into a model that was loaded in the engine's type.
        if hasattr(plain, "peft_config") or plain.dtype == dtype:
            return plain
        return {name: weight.to(dtype) for name, weight in plain.state_dict().items()}

    def _grow(self, places: Sequence[int]) -> None:
        """Grows a tree for each prompt of this process, once those of the last update have been
        learned from.

        Args:
            places: of the tasks, each as often as a tree has leaves.
        """
        number = self._number
        leaves = self.recipe.explore.num_leaves
        if self._of_update:
            # Now, not when they were grown: no tree may find its own steps.
            self._session.remember(self._of_update, number - 1)
        self._publish()
        tasks = self._session.tasks
        with self._awake():
            # TRL repeats a prompt once for each of its rows.
            own = [tasks[place] for place in places[::leaves]]
            self.trees = list(self._session.credit(self._session.sample(number, own)))
        self._rows = tree_rows(self.trees, self.recipe)
        self._of_update = self._of_all(self.trees, number)
        # One process writes.
        if self.accelerator.is_main_process:
            metrics = self._session.pop_metrics(self._of_update)
            for name, value in metrics.items():
                self._metrics["train"][f"tree/{name}"].append(value)
            kept = self._of_update if self.recipe.track.record_trees else []
            self._session.record(self.args.output_dir, kept, number, metrics)

    @contextmanager
    def _awake(self) -> Iterator[None]:
        """Holds the keys and values of a vLLM that sleeps between generations."""
        generation = self.vllm_generation if self._asks_vllm else None
        if generation is None or not generation.enable_sleep_mode:
            yield
            return
        generation.llm.wake_up(tags=["kv_cache"])
        yield
        # Weights too: TRL loads them again before it samples.
        generation.llm.sleep(level=2)
        generation._llm_weights_sleeping = True

    def _of_all(self, trees: Sequence[Tree], number: int) -> list[Tree]:
        """The trees of all processes, in their order; sent as JSON."""
        if self.accelerator.num_processes == 1:
            return list(trees)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "trees.jsonl")
            path.write_text("".join(f"{measuring.tree_to_json(tree)}\n" for tree in trees), "utf-8")
            own = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            own = own.to(self.accelerator.device)
            sizes = self.accelerator.gather(torch.tensor([len(own)], device=own.device)).tolist()
            # Gathered tensors must be of one size.
            padded = torch.nn.functional.pad(own, (0, max(sizes) - len(own)))
            parts = self.accelerator.gather(padded).view(len(sizes), -1).cpu()
            path.write_bytes(
                b"".join(
                    part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)
                )
            )
            return read_trees(path)

    # ------------------------------------------------------------------ what TRL calls

    def _roll_out(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[object]]:
        return rollout_fields(self._rows, trainer.processing_class.eos_token_id)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns TRL's batch of a generation, with advantages by token and RAPO's shaping."""
        self._grow([one["task"] for one in inputs])
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        return output | self._credit(output, self._rows)

    def _credit(self, output: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
        """What differs from TRL's batch."""
        device = self.accelerator.device
        config = self.recipe
        sums = self.accelerator.reduce(own_sums(rows).to(device), reduction="sum").cpu()
        own = coefficients(rows, config, sums)
        theirs = trl_coefficients(
            rows,
            config,
            num_tokens=float(output["num_items_in_batch"]),
            num_rows=len(rows) * self.accelerator.num_processes,
        )
        plain = row_advantages(rows, output["completion_ids"].shape[1])
        # TRL's minimum of two terms is homogeneous in positive factors of the advantage.
        advantages = plain * (own / theirs)[:, None]
        shaping = row_shaping(rows)
        old = output.get("old_per_token_logps")
        if config.loss.old_logprobs == "engine":
            old = output["sampling_per_token_logps"]
        found = {"coefficients": own.to(device)}
        if old is None:
            advantages = shaped_at_one(advantages, shaping, config)
        else:
            # TRL's ratio is then (1 + m F) ρ, which its clip acts on (RAPO, eq. 8 and 11).
            found["old_per_token_logps"] = old - shaping.log().to(device)
        return found | {"advantages": advantages.to(device)}

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what TRL makes, and stores it for the terms of the loss that are ours."""
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self._scored = found[:2]
        return found

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        """Returns TRL's loss of the policy, and the terms that are ours: KL and entropy, whose
        weights are not TRL's."""
        # TRL's term has the same weight for every row.
        beta = self.beta
        self.beta = 0.0
        try:
            loss: Tensor = super()._compute_loss(model, inputs)
        finally:
            self.beta = beta
        own = self._of_all_tokens(inputs, beta)
        # Gradients are means over the processes.
        total: Tensor = loss + self.accelerator.num_processes * own
        return total

    def _of_all_tokens(self, inputs: Mapping[str, Any], beta: float) -> Tensor:
        """Σ_i c_i Σ_t (beta k3 - loss.entropy_coef H), of this pass's rows."""
        logprobs, entropies = self._scored
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        terms = torch.zeros_like(logprobs)
        if beta:
            divergence = losses.k3_divergence(logprobs, inputs["ref_per_token_logps"])
            mean = (divergence.detach() * mask).sum() / mask.sum().clamp(min=1.0)
            self._metrics["train"]["kl"].append(self.accelerator.gather(mean).mean().item())
            terms = beta * divergence
        if coef := self.recipe.loss.entropy_coef:
            terms = terms - coef * entropies
        found: Tensor = (inputs["coefficients"][:, None] * terms * mask).sum()
        return found


def _objects(others: dict[str, Any]) -> Any:
    """Takes what a user's script gives in place of settings, by the names of `Session`."""
    found = {OBJECTS[name]: others.pop(name, None) for name in OBJECTS}
    if hasattr(data := found["tasks"], "__getitem__") and not isinstance(data, str | Mapping):
        # Nothing is held out of it, since nothing is evaluated here.
        found["tasks"] = {"train": data, "eval": data}
    return found


def _recipe(recipe: Any, objects: Mapping[str, Any]) -> Config:
    """Reads the recipe."""
    if isinstance(recipe, GRPOConfig):
        raise SettingError(
            "recipe: got TRL's arguments, expected a recipe: its path, tables or a Config. Pass"
            " args=grpo_config(recipe, ...) beside it.",
            code="trl-recipe-missing",
        )
    config = load_config(recipe)
    # The settings' default is a toy.
    if objects["tasks"] is None and "kind" not in config.tasks.model_fields_set:
        raise SettingError(
            "train_dataset: got none, and the recipe has no tasks.kind. Pass one, or name the"
            " recipe's tasks.",
            code="trl-no-tasks",
        )
    return config


def _refuse_others(others: Mapping[str, Any]) -> None:
    for name in others:
        why = REFUSED.get(name, "TreeGRPOTrainer has no such argument; see docs/trl.md")
        raise SettingError(f"{name}: expected none: {why}.", code="trl-refused-argument")
