"""What tests of trees inside verl share: a queue, a server and ranks that stand in for those of a
cluster, and one step of training through verl's own functions."""

from __future__ import annotations

import asyncio
import copy
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from tests.support.hosts import flat, own_gradient
from tests.support.slow_learner import distance

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transfer_queue
    import verl
    from hydra import compose, initialize_config_dir
    from verl.trainer.ppo.v1.agent_loop_tq import get_trajectory_info  # noqa: F401
    from verl.utils import tensordict_utils
    from verl.utils.config import omega_conf_to_dataclass
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict
    from verl.workers.utils.losses import ppo_loss

    from treegraft.extras.verl import trainer as of_trainer
    from treegraft.extras.verl.keeper import Keeper
    from treegraft.extras.verl.worker import TreeWorker

from transformers import AutoModelForCausalLM, AutoTokenizer

from treegraft import Config, Status, Tree
from treegraft.extras.verl.arguments import arguments
from treegraft.parts import GraftCause, Sampling, interfaces
from treegraft.policy.engine.native import NativeEngine


def verl_config(given: Config, folder: Path, *more: str) -> Any:
    """verl's configuration by a recipe, as its command line would make it."""
    path = folder / "recipe.json"
    path.write_text(given.model_dump_json(), encoding="utf-8")
    own = [
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        f"trainer.default_local_dir={folder}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ]
    where = os.path.join(os.path.dirname(verl.__file__), "trainer/config")
    with warnings.catch_warnings(), initialize_config_dir(where, version_base=None):
        warnings.simplefilter("ignore")
        return compose("ppo_trainer", overrides=[*arguments(path, ()), *own, *more])


# ---------------------------------------------------------------------- what stands in


class Queue:
    """In place of TransferQueue: rows by key in this process."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    async def async_kv_put(self, key: str, partition_id: str, tag: dict[str, Any]) -> None:
        self.tags.setdefault(key, {}).update(tag, partition=partition_id)

    async def async_kv_batch_put(self, **given: Any) -> None:
        self.kv_batch_put(**given)

    def kv_batch_put(
        self, keys: Sequence[str], partition_id: str, fields: Any = None, tags: Any = None
    ) -> Any:
        for place, key in enumerate(keys):
            if tags is not None:
                self.tags.setdefault(key, {}).update(tags[place], partition=partition_id)
            if fields is not None:
                plain = {n: getattr(v, "data", v) for n, v in fields[place].items()}
                tensors = {n: v for n, v in fields[place].items() if torch.is_tensor(v)}
                self.rows.setdefault(key, {}).update(plain | tensors)
        return self.batch(keys, partition_id)

    def kv_batch_get(
        self, keys: Sequence[str], partition_id: str, select_fields: Any = None
    ) -> Any:
        rows = [self.rows[key] for key in keys]
        names = [one for one in select_fields or rows[0] if one in rows[0]]
        found = list_of_dict_to_tensordict([{one: row[one] for one in names} for row in rows])
        for name in names:
            if torch.is_tensor(rows[0][name]) and rows[0][name].dim():
                # TransferQueue never stacks rows, also where they have one length.
                columns = [row[name] for row in rows]
                found[name] = torch.nested.as_nested_tensor(columns, layout=torch.jagged)
        return found

    def batch(self, keys: Sequence[str], partition_id: str = "train") -> Any:
        tags = [self.tags.get(key, {}) for key in keys]
        return transfer_queue.KVBatchMeta(keys=list(keys), tags=tags, partition_id=partition_id)

    def found(self, partition_id: str = "train") -> list[str]:
        """Of rows, as verl's buffer would find them."""
        return [key for key in self.rows if self.tags[key]["partition"] == partition_id]


@contextmanager
def in_queue(patch: Any) -> Iterator[Queue]:
    """Puts a `Queue` in the place of TransferQueue."""
    queue = Queue()
    patch.setattr(transfer_queue, "init", lambda *_: None)
    for name in ("async_kv_put", "async_kv_batch_put", "kv_batch_put", "kv_batch_get"):
        patch.setattr(transfer_queue, name, getattr(queue, name))
    yield queue


class Client:
    """In place of verl's client of vLLM servers: our native engine, which gets verl's parameters;
    its entropies are exact."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.version = 0
        self.asked: list[dict[str, Any]] = []
        self._asked = Counter[tuple[Any, ...]]()

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        self.asked.append({"request_id": request_id, **sampling_params})
        sampling = Sampling(
            max_new_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            stop=tuple(sampling_params["stop"]),
        )
        # The same draws in whatever order the requests come.
        key = (request_id, *prompt_ids)
        self._asked[key] += 1
        key = (*key, self._asked[key])
        done = await self.engine.complete(interfaces.Request(prompt_ids, sampling, key))
        return SimpleNamespace(
            token_ids=list(done.token_ids),
            log_probs=list(done.sampling_logprobs),
            extra_fields={"global_steps": self.version, "entropies": list(done.entropies)},
        )


class Handle:
    """In place of a Ray actor's handle: calls the object here."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.held, name))


class Ranks:
    """In place of verl's group of workers: so many ranks."""

    def __init__(self, num: int) -> None:
        self._dispatch_info = {"actor": list(range(num))}


# ---------------------------------------------------------------------- a step of training


class Held:
    """A worker and a trainer beside what stands in for the cluster."""

    def __init__(
        self, given: Config, folder: Path, patch: Any, *more: str, num_ranks: int = 1
    ) -> None:
        self.config = verl_config(given, folder, *more)
        patch.setattr(of_trainer.PPOTrainerSync, "__init__", lambda self, config: None)
        self.trainer = of_trainer.TreeTrainer(self.config)
        self.trainer.config = self.config
        self.trainer.global_steps = 1
        self.trainer.actor_rollout_wg = Ranks(num_ranks)
        self.num_ranks = num_ranks
        self.recipe = self.trainer.recipe
        self.queue = Queue()
        path = given.model.path
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
        self.trainer.tokenizer = tokenizer
        sampled = copy.deepcopy(self.model).requires_grad_(False)
        self.client = Client(NativeEngine(sampled, tokenizer, given.engine))
        self.keeper = Keeper(self.config.treegraft.settings, str(folder / "treegraft"))
        self.worker = TreeWorker(self.config, self.client, keeper=Handle(self.keeper))
        self.trees: dict[str, Tree] = {}

    def close(self) -> None:
        self.worker._held.close()
        self.keeper._held.close()

    def grow(self, num: int, *, validates: bool = False) -> list[str]:
        """Has the worker run so many prompts; returns their uids."""
        parts = self.worker._session.parts
        tasks = list(parts.eval_tasks if validates else parts.train_tasks)[:num]
        uids = [f"{'val' if validates else 'uid'}{place}" for place in range(num)]
        sampling = {"temperature": 0.0, "top_k": -1, "top_p": 1.0}

        async def run() -> None:
            await asyncio.gather(
                *(
                    self.worker._run_prompt(
                        {
                            "uid": uid,
                            "raw_prompt": [{"role": "user", "content": task.question}],
                            "extra_info": {"index": place, "treegraft": task.id},
                            "reward_model": {"ground_truth": ""},
                            "agent_name": "single_turn_agent",
                            "global_steps": 1,
                        },
                        sampling,
                        {"validate": validates, "step": 1},
                    )
                    for place, (uid, task) in enumerate(zip(uids, tasks, strict=True))
                )
            )

        add = self.keeper.add

        async def noted(tree: Tree, number: int) -> None:
            place = [task.id for task in tasks].index(tree.task.id)
            self.trees[uids[place]] = tree
            await add(tree, number)

        self.worker._keeper = Handle(SimpleNamespace(add=noted))
        asyncio.run(run())
        return uids

    # ------------------------------------------------------------------ verl's own learning

    def step(self, queue: Queue) -> list[Gap]:
        """Takes the batch in the queue through verl's and our functions; returns the gap of each
        minibatch."""
        batch = queue.batch(queue.found())
        batch = self.trainer._balance_batch(batch, {})
        self._score(queue, batch)
        batch = self.trainer._compute_advantage(batch, {})
        own = len(batch) // self.num_ranks
        size = self.trainer._rows_of_minibatch // self.num_ranks
        gaps = []
        for start in range(0, own, size):
            keys = [
                batch.keys[rank * own + start : rank * own + start + size]
                for rank in range(self.num_ranks)
            ]
            gaps.append(self._gap(queue, keys))
        return gaps

    def _score(self, queue: Queue, batch: Any) -> None:
        """What verl's `compute_log_prob` writes."""
        with torch.no_grad():
            for key in batch.keys:
                row = queue.rows[key]
                found = self._logprobs(row)[len(row["prompts"]) - 1 : -1]
                row["old_log_probs"] = found

    def _logprobs(self, row: Mapping[str, Any]) -> torch.Tensor:
        """[tokens] of the token after each; 0 for the last."""
        ids = row["input_ids"]
        logits = self.model(ids[None]).logits[0].float() / self.recipe.rollout.temperature
        found = logits[:-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        return torch.cat([found, torch.zeros(1)])

    def loss(self, queue: Queue, keys: Sequence[Sequence[str]]) -> torch.Tensor:
        """The mean of verl's `ppo_loss` over ranks, as DDP and FSDP make it of gradients."""
        config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        rows = [queue.rows[key] for rank in keys for key in rank]
        num_tokens = sum(int(row["loss_mask"].sum()) for row in rows)
        losses = []
        for rank in keys:
            data = queue.kv_batch_get(rank, "train")
            tensordict_utils.assign_non_tensor(
                data,
                dp_size=self.num_ranks,
                batch_num_tokens=num_tokens,
                global_batch_size=len(rows),
            )
            output = {"log_probs": torch.cat([self._logprobs(queue.rows[key]) for key in rank])}
            losses.append(ppo_loss(config, output, data)[0])
        return torch.stack(losses).mean()

    def _gap(self, queue: Queue, keys: Sequence[Sequence[str]]) -> Gap:
        self.model.zero_grad()
        loss = self.loss(queue, keys)
        loss.backward()
        theirs = {n: w.grad for n, w in self.model.named_parameters() if w.grad is not None}
        real = [key for rank in keys for key in rank if not key.startswith("pad")]
        uids = dict.fromkeys(key.rsplit("_", 2)[0] for key in real)
        # In the order of their prompts.
        trees = [self.trees[uid] for uid in sorted(uids)]
        ours, metrics = own_gradient(self.model, trees, self.recipe)
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        steps = [step for tree in trees for step in tree.steps]
        return Gap(
            relative=distance(*flat(theirs, ours)),
            losses=(float(loss.detach()), metrics["learn/loss"]),
            clipped=metrics.get("learn/clip_frac", 0.0),
            num_trees=len(trees),
            num_grafts=sum(isinstance(step.cause, GraftCause) for step in steps),
            num_failed=sum(leaf.status is Status.FAILED for leaf in leaves),
            num_truncated=sum(leaf.status is Status.TRUNCATED for leaf in leaves),
            num_weights=len({leaf.weight for leaf in leaves}),
        )


class Gap(NamedTuple):
    """One minibatch in verl against a step of our learner, on the same trees and weights."""

    relative: float
    """‖g_verl - g‖ / ‖g‖."""
    losses: tuple[float, float]
    """verl's and ours."""
    clipped: float
    num_trees: int
    num_grafts: int
    num_failed: int
    num_truncated: int
    num_weights: int
    """Different leaf weights."""
