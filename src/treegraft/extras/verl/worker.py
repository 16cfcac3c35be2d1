"""verl's worker of rollouts, with a tree in place of a prompt's independent sessions."""

from __future__ import annotations

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

import ray
import torch
import transfer_queue
from transformers import GenerationConfig
from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ

from treegraft import Config, DataError, Session, Task, Tree
from treegraft.extras.verl.engine import ServerEngine
from treegraft.extras.verl.keeper import KeptBuffer
from treegraft.extras.verl.rows import ADVANTAGES, FACTS, Facts, tree_rows
from treegraft.parts import Independent, LeafRow, errors

_log = logging.getLogger(__name__)
# The class below Ray's decorator: an actor's class cannot be derived from.
_Worker: Any = AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__


class TreeWorker(_Worker):  # type: ignore[misc]
    """Grows one tree for each prompt of its share and puts its leaves into verl's queue, as the
    sessions of that prompt."""

    def __init__(self, config: Any, llm_client: Any, *others: Any, keeper: Any = None) -> None:
        """Makes all that trees need, apart from the servers.

        Args:
            keeper: the handle of the `Keeper`; None finds it by config.treegraft.keeper.
        """
        super().__init__(config, llm_client, *others)
        own = config.treegraft
        self.recipe = Config.model_validate_json(own.settings)
        self._keeper = ray.get_actor(own.keeper) if keeper is None else keeper
        engine = ServerEngine(
            llm_client,
            self.tokenizer,
            _end_ids(self.tokenizer, self.recipe.model.path),
            self.recipe.engine,
            max_context=_max_context(self.rollout_config),
        )
        self._held = ExitStack()
        self._session = self._held.enter_context(
            Session(self.recipe, engine=engine, retriever=KeptBuffer(self._keeper), learns=False)
        )
        parts = self._session.parts
        self._tasks = {task.id: task for task in (*parts.train_tasks, *parts.eval_tasks)}
        # Further trees would wait inside the engine, against their deadlines.
        at_once = parts.num_trees_at_once(self.recipe.explore.num_leaves)
        self._free = asyncio.Semaphore(min(self.recipe.rollout.max_live_trees, at_once))

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        """Grows the tree of a prompt; its status in the queue says whether that was done.

        Overrides verl's, which runs the sessions of a prompt.
        """
        validates = trajectory["validate"]
        uid = prompt["uid"]
        place = {"key": uid, "partition_id": "val" if validates else "train"}
        await transfer_queue.async_kv_put(**place, tag={"status": "running"})
        status = "finished"
        try:
            async with self._free:
                if validates:
                    await self._validate(prompt, sampling_params)
                else:
                    await self._train(prompt)
        # Whatever it is, verl's buffer waits for the status.
        except Exception:
            _log.exception("the tree of prompt %s failed", uid)
            status = "failure"
        await transfer_queue.async_kv_put(**place, tag={"status": status})

    async def _train(self, prompt: dict[str, Any]) -> None:
        step = int(prompt["global_steps"])
        sampled = await self._session.asample(step, [self._task(prompt)])
        (tree,) = self._session.credit(sampled)
        await self._keeper.add.remote(tree, step)
        uid = prompt["uid"]
        rows = tree_rows(tree, self.recipe)
        await asyncio.gather(
            *(
                self._put(prompt, number, tree, row, asdict(Facts.of(row, uid)), validates=False)
                for number, row in enumerate(rows)
            )
        )

    async def _validate(self, prompt: dict[str, Any], sampling_params: dict[str, Any]) -> None:
        """Puts independent rollouts into the queue: nothing branches, nothing is grafted."""
        num = int(prompt.get("__rollout_n__", self.config.actor_rollout_ref.rollout.val_kwargs.n))
        work = self._grown_to_measure
        task = self._task(prompt)
        tree = await self._session.arun(work, task, sampling_params, num)
        temperature = float(sampling_params["temperature"])
        for number, row in enumerate(tree_rows(tree, self._as_measured(temperature, num))):
            await self._put(prompt, number, tree, row, {}, validates=True)

    async def _grown_to_measure(self, task: Task, sampling: dict[str, Any], num: int) -> Tree:
        # Evaluation never branches (law 11).
        grower = self._session.parts.grower(Independent())
        temperature = float(sampling["temperature"])
        filters = grower.limits.filters
        if temperature:
            top_k = max(0, int(sampling["top_k"]))
            filters = replace(filters, top_k=top_k, top_p=float(sampling["top_p"]))
        grower.limits = replace(
            grower.limits, temperature=temperature, num_leaves=num, filters=filters
        )
        # Two measurements of one step must not share their noise.
        kind = "sampled" if temperature else "greedy"
        key = (self.recipe.run.seed, f"eval-{kind}")
        (tree,) = await grower.grow_all(
            [task], noise_key=key, group_prefix=f"eval-{kind}", max_live_trees=1
        )
        return tree

    def _as_measured(self, temperature: float, num: int) -> Config:
        """The recipe with the temperature and the leaves of a validation."""
        rollout = self.recipe.rollout.model_copy(update={"temperature": temperature or 1.0})
        explore = self.recipe.explore.model_copy(update={"num_leaves": num})
        return self.recipe.model_copy(update={"rollout": rollout, "explore": explore})

    def _task(self, prompt: dict[str, Any]) -> Task:
        name = (prompt.get("extra_info") or {}).get("treegraft")
        if name not in self._tasks:
            raise DataError(
                f"extra_info.treegraft: got {name!r}, expected the id of a task of the recipe"
                " (treegraft.recipe); write the files with `treegraft verl-data RECIPE`, anew after"
                " each change of [tasks].",
                code="verl-unknown-task",
            )
        return self._tasks[name]

    async def _put(
        self,
        prompt: dict[str, Any],
        number: int,
        tree: Tree,
        row: LeafRow,
        facts: dict[str, Any],
        *,
        validates: bool,
    ) -> None:
        """Puts a leaf into the queue, as verl does with a session."""
        more = {name: value for name, value in prompt.items() if name not in _OF_SESSIONS}
        if not validates:
            more[ADVANTAGES] = torch.tensor(row.advantages, dtype=torch.float32)
        await self._agent_loop_postprocess(
            _output(tree, row, facts), validates, **more, session_id=number
        )


_OF_SESSIONS = ("agent_name", "__rollout_n__", "__do_sample__")
"""Columns that verl's own sessions take out."""


def _output(tree: Tree, row: LeafRow, facts: dict[str, Any]) -> AgentLoopOutput:
    """A leaf as verl's session."""
    measured = {} if row.is_correct is None else {"acc": float(row.is_correct)}
    depth = row.leaf_id.count(".") + 1
    return AgentLoopOutput(
        prompt_ids=row.prompt_ids,
        response_ids=row.completion_ids,
        response_mask=list(map(int, row.loss_mask)),
        response_logprobs=row.sampling_logprobs,
        # verl would ask its own reward functions for None.
        reward_score=float(row.reward or 0.0),
        # The prompt, and each step with a result but the last.
        num_turns=2 * depth,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": row.policy_version,
            "max_global_steps": row.policy_version,
            "reward_extra_info": measured,
            "leaf": f"{tree.group_id}/{row.leaf_id}",
            FACTS: facts,
        },
    )


def _max_context(rollout: Any) -> int:
    """The longest path in tokens, as verl's servers have it."""
    return int(rollout.max_model_len or rollout.prompt_length + rollout.response_length)


def _end_ids(tokenizer: Any, path: str) -> set[int]:
    """The tokens that end an answer: the tokenizer's, and those of the model's generation
    settings."""
    found = {tokenizer.eos_token_id}
    try:
        more = GenerationConfig.from_pretrained(path).eos_token_id
    # Not every model has such a file.
    except OSError:
        more = None
    found |= set(more) if isinstance(more, list) else {more}
    ends = {one for one in found if one is not None}
    if not ends:
        raise errors.SettingError(
            f"model.path: '{path}' names no token that ends an answer; expected one in its"
            " tokenizer or in generation_config.json.",
            code="verl-without-end-token",
        )
    return ends
