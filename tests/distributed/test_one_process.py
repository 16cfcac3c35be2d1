"""Eight and 64 ranks in one process, without a network and without a GPU.

One after the other, by torch's process group that moves nothing: rows of weights, of checkpoints
and of checksums are real, since no rank needs another one's for them. What comes of a pass is not,
for gathered weights are a rank's own rows; there plans, shapes and memory are compared.

All eight at once, by tensors that hold every rank's part (LocalTensorMode): losses, gradients and
an optimiser step in values. Values of two and four real ranks are in `test_laws`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.distributed.laws import optimiser_rows, settings, some_trees
from tests.support.families import build_model
from tests.support.slow_learner import gradients_of
from torch.distributed._local_tensor import LocalTensorMode, maybe_disable_local_tensor_mode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.testing._internal.distributed.fake_pg import FakeStore

from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.plan import plan_passes
from treegraft.policy.learn.ranks import Ranks
from treegraft.policy.learn.sharded import ShardedLearner, meta_model, model_shape
from treegraft.policy.load import load_model
from treegraft.policy.shapes import ModelShape, published_shape
from treegraft.policy.shards import local_rows
from treegraft.policy.tiny import build_random_model
from treegraft.policy.weights import fingerprint_of, plain_weights, weights_fingerprint
from treegraft.settings.load import load_config

pytestmark = [pytest.mark.smoke, pytest.mark.filterwarnings("ignore::UserWarning")]


class OneOf(Ranks):
    """A rank whose peers are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device("cpu")


@contextmanager
def one_of(rank: int, size: int) -> Iterator[OneOf]:
    """Makes this process one of so many ranks for the time of the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield OneOf(rank, size)
    finally:
        dist.destroy_process_group()


def learner_of(ranks: OneOf, **tables: Any) -> ShardedLearner:
    """The learner of a rank. Nothing is broadcast, so each has the whole model to take its rows
    of."""
    model = build_model("llama")
    return ShardedLearner(ranks, model_shape(model), settings(**tables), source=model)


@pytest.mark.parametrize("size", [8, 64])
def test_rows_checksums_and_checkpoints_of_all_ranks_are_the_whole(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank's rows are those of the model; the sums over the ranks' parts are the checksum; the
    ranks' files of moments hold every row once. With 64 ranks most hold no row of most weights."""
    whole = plain_weights(build_model("llama"))
    (tmp_path / "treegraft").mkdir()
    sums: list[torch.Tensor] = []
    seen = dict.fromkeys(whole, 0)
    facts: dict[str, Any] = {}
    monkeypatch.setattr(dist, "all_reduce", lambda totals, *_: sums.append(totals.clone()))
    monkeypatch.setattr(
        "treegraft.policy.learn.sharded.fingerprint_of", lambda found: facts.update(found) or ""
    )
    for rank in range(size):
        with one_of(rank, size) as ranks:
            learner = learner_of(ranks)
            for name, weight in learner.model.named_parameters():
                local, first = local_rows(weight)
                assert torch.equal(local, whole[name][first : first + len(local)])
                seen[name] += len(local)
            learner.fingerprint()
            learner.save(tmp_path)
    named = dict(build_model("llama").named_parameters())
    assert all(seen[name] == len(weight) for name, weight in named.items())
    total = torch.stack(sums).sum(dim=0).tolist()
    found = {name: (*facts[name][:2], one) for name, one in zip(facts, total, strict=True)}
    assert fingerprint_of(found) == weights_fingerprint(whole)
    written = optimiser_rows(tmp_path)
    one = Learner(
        build_model("llama"), settings().learn, settings().loss, length_constant=7
    ).optimiser.state()
    assert set(written._parts) == set(one)
    for name, tensor in one.items():
        assert written.whole(name).shape == tensor.shape
        if name.startswith("master."):
            assert torch.equal(written.whole(name), tensor)


@pytest.mark.parametrize(("size", "ranks_tried"), [(8, (0, 3, 7)), (64, (0, 63))])
def test_every_rank_makes_its_part_of_the_plan(
    size: int, ranks_tried: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank makes as many passes as any other, though not all have trees for each; after them its
    moments are as large as its rows, and what it streams has the model's names, shapes and type."""
    # The others' log-probabilities are not there.
    monkeypatch.setattr(ShardedLearner, "_write_back", lambda *_: None)
    trees = some_trees(8)
    plan = plan_passes(trees, range(len(trees)), 24, size)
    counts = {len(plan.own(rank)) for rank in range(size)}
    assert len(counts) == 1
    assert sum(bool(pack) for rank in range(size) for pack in plan.own(rank)) == len(plan.packs)
    expected = {
        name: (weight.shape, torch.bfloat16)
        for name, weight in plain_weights(build_model("llama")).items()
    }
    for rank in ranks_tried:
        with one_of(rank, size) as ranks:
            learner = learner_of(ranks, model={"dtype": "bfloat16"})
            kept, metrics = learner.learn(trees)
            assert len(kept) == len(trees) and metrics["learn/num_optimiser_steps"] > 0
            rows = {
                name: local_rows(weight)[0].shape
                for name, weight in learner.model.named_parameters()
            }
            for name, state in learner.optimiser.state().items():
                kind, _, weight = name.partition(".")
                if kind in ("exp_avg", "exp_avg_sq"):
                    assert local_rows(state)[0].shape == rows[weight]
            streamed = {name: (one.shape, one.dtype) for name, one in learner.stream()}
            assert streamed == expected


@pytest.mark.parametrize(
    ("name", "size"), [("qwen2.5-7b", 8), ("qwen2.5-7b", 64), ("qwen2.5-32b", 64)]
)
def test_memory_of_a_rank_is_what_doctor_says(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows that a rank holds, in float32, against `ModelShape.learner_parts`: no more than one
    row of each weight apart. Their memory is never touched."""
    config = load_config({"model": {"path": f"shape:{name}", "dtype": "bfloat16"}})
    model, _ = load_model(config.model, has_weights=False)
    said = ModelShape.of_model(model).learner_parts(config, size)
    monkeypatch.setattr(ShardedLearner, "_fill", lambda *_: None)
    shape = model_shape(model)
    whole = meta_model(shape, config)
    spare = sum(4 * weight.shape[1:].numel() for weight in whole.parameters())
    for rank in (0, size - 1):
        with one_of(rank, size) as ranks:
            learner = ShardedLearner(ranks, shape, config)
            held = sum(local_rows(weight)[0].nbytes for weight in learner.model.parameters())
            assert held <= said["masters"] + spare
            if rank == 0:
                assert held >= said["masters"]


EVEN = published_shape("shape:qwen2.5-1.5b") | {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
"""All sizes divide by 8: a LocalTensor's parts have one size."""


def test_eight_ranks_at_once_sum_their_gradients_and_step_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each makes the same pass, so gradients are eight times those of one process, never their
    mean; after a step, whose gradients are clipped, the weights are those of one process that has
    learned from eight times the loss."""
    # A LocalTensor has no storage of its own to free: weights stay gathered.
    for name in ("free_storage", "alloc_storage"):
        monkeypatch.setattr(_fsdp_param, name, lambda _: None)

    def fill(self: ShardedLearner, model: Any) -> None:
        whole = dict(self._source.named_parameters()) | dict(self._source.named_buffers())
        with torch.no_grad():
            for name, weight in (*model.named_parameters(), *model.named_buffers()):
                if not hasattr(weight, "to_local"):
                    weight.copy_(whole[name])
                    continue
                local = weight.to_local()
                with maybe_disable_local_tensor_mode():
                    parts = whole[name].chunk(8)
                    for rank, part in local._local_tensors.items():
                        part.copy_(parts[rank])

    monkeypatch.setattr(ShardedLearner, "_fill", fill)
    config = settings()
    monkeypatch.setattr("treegraft.policy.learn.tree_attention.tree_kernels", lambda *_: None)
    batch = pack_trees(some_trees(1))
    source, plain = (build_random_model(EVEN, torch.float32, 0).eval() for _ in range(2))
    one = Learner(plain, config.learn, config.loss, length_constant=7)
    (8.0 * one.scores(batch)[0].sum()).backward()
    expected = {name: weight.clone() for name, weight in gradients_of(one.optimiser).items()}
    norm = one.optimiser.step(1e-2)
    with one_of(0, 8) as ranks, LocalTensorMode(8):
        many = ShardedLearner(ranks, model_shape(source), config, source=source)
        many.scores(batch)[0].sum().backward()
        for name, gradient in gradients_of(many.optimiser).items():
            found = gradient.full_tensor().reconcile()
            off = (found - expected[name]).norm() / expected[name].norm()
            assert off < 1e-6, (name, float(off))
        assert many.optimiser.step(1e-2) == pytest.approx(norm, rel=1e-6)
        streamed = {name: weight.reconcile() for name, weight in many.stream()}
    for name, weight in plain_weights(plain).items():
        assert torch.allclose(streamed[name], weight, atol=1e-6), name
