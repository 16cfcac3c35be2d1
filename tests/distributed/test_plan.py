"""The plan of passes, without any process: arithmetic on paper."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.distributed.laws import settings, some_trees
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.trees import recorded_trees
from torch.distributed import checkpoint

from treegraft.core.team import Alone
from treegraft.core.types import Tree
from treegraft.policy.learn import ranks, sharded
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.plan import by_step, deal, gathered, plan_passes, spread
from treegraft.policy.learn.sent_trees import packed, unpacked
from treegraft.policy.learn.sharded import StreamedWeights, refuse
from treegraft.policy.learn.torchrun import num_ranks
from treegraft.policy.load import with_adapters
from treegraft.policy.weights import bit_sum
from treegraft.settings.load import config_json


def test_passes_are_dealt_longest_first() -> None:
    # 9 to the first, 7 and 5 to the second, 4 to the first (9 < 12), 3 to the second, 2 to the
    # first: 15 and 15.
    assert deal([4, 9, 2, 7, 3, 5], 2) == (0, 0, 0, 1, 1, 1)
    assert deal([1, 1, 1], 3) == (0, 1, 2) and deal([], 4) == ()


@given(st.lists(st.integers(1, 1000), max_size=30), st.integers(1, 8))
def test_no_group_has_more_than_a_third_above_the_best(costs: list[int], groups: int) -> None:
    """Graham: longest first takes at most 4/3 of the best time, which is no less than the mean and
    the longest."""
    owners = deal(costs, groups)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == g) for g in range(groups)]
    assert sum(loads) == sum(costs)
    if len(costs) > groups:
        at_least = sorted(costs, reverse=True)
        best = max(
            sum(costs) / groups, costs and max(costs), sum(at_least[groups - 1 : groups + 1])
        )
        assert max(loads) <= 4 / 3 * best + 1e-9


@pytest.mark.parametrize("groups", [1, 2, 3, 20])
def test_every_part_is_made_once(groups: int) -> None:
    trees = some_trees()
    plan = plan_passes(trees, range(len(trees)), 24, groups)
    made = [plan.own(group) for group in range(groups)]
    assert len({len(own) for own in made}) == 1
    parts = [part for own in made for pack in own for part in pack]
    leaves = [(part.owner, leaf.step_id) for part in parts for leaf in part.tree.leaves]
    assert sorted(leaves) == sorted(
        (n, leaf.step_id) for n, tree in enumerate(trees) for leaf in tree.leaves
    )


def test_values_come_back_to_their_steps() -> None:
    trees = some_trees(3)
    plan = plan_passes(trees, range(3), 24, 1)
    sizes = [sum(sum(s.sampled_mask) for p in pack for s in p.tree.steps) for pack in plan.packs]
    own = [torch.arange(float(size)) for size in sizes]
    found = list(by_step(plan, gathered(Alone(), plan, own)))
    assert sum(len(values) for _, _, values in found) == sum(sizes)
    assert found[0][2] == [] and found[1][2] == [0.0, 1.0][: len(found[1][2])]
    step = next(
        step for _, step, _ in found if not all(step.sampled_mask) and any(step.sampled_mask)
    )
    values = [7.0] * sum(step.sampled_mask)
    assert spread(step, values, 0.5).tolist() == [7.0 if m else 0.5 for m in step.sampled_mask]


@given(st.integers(0, 40), st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
def test_checksums_of_parts_add_up(cut: int, dtype: torch.dtype) -> None:
    whole = (torch.arange(40) * 37 - 500).to(dtype)
    parts = bit_sum(whole[:cut]) + bit_sum(whole[cut:], cut)
    assert int(parts) == int(bit_sum(whole))
    swapped = whole.clone()
    swapped[[3, 30]] = swapped[[30, 3]]
    assert int(bit_sum(swapped)) != int(bit_sum(whole))


def test_the_number_of_ranks_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_ranks(settings()) == 1 and num_ranks(settings(learn={"ranks": 4})) == 4
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "4"),
        ("MASTER_ADDR", ""),
        ("MASTER_PORT", ""),
    ):
        monkeypatch.setenv(name, value)
    assert num_ranks(settings(learn={"ranks": 4})) == num_ranks(settings()) == 4
    with raises_code("ranks-unequal", match=r"got 2, but .* is 4; .* --nproc-per-node 2"):
        num_ranks(settings(learn={"ranks": 2}))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"python_torch": "torch 2.12.0"}, "rank 1 on b: got torch 2.12.0, expected .* torch 2.13"),
        ({"code": "beef"}, r"rank 1 on b: its treegraft .* \(checksum beef, expected cafe\)"),
    ],
)
def test_ranks_of_other_software_are_refused(changed: dict[str, str], said: str) -> None:
    own = settings()
    first = ranks.Hello("a", 1, "torch 2.13.0", "cafe", config_json(own), "")
    found = ranks._difference(own, [first, replace(first, host="b", **changed)])
    assert re.match(said, found) and bool(found) == bool(said)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_models_that_several_ranks_cannot_learn_are_refused() -> None:
    for family in ("llama", "qwen3"):
        refuse(build_model(family), settings())
    with raises_code(
        "trees-not-packed", match=r"cannot be packed \(.*\), which several ranks need"
    ):
        refuse(build_model("bloom"), settings())
    embedded = settings(model={"lora": {"rank": 2, "targets": ["embed_tokens", "q_proj"]}})
    adapted = with_adapters(build_model("llama"), embedded.model, seed=0)
    with raises_code(
        "lora-targets-not-linear", match=r"lora\.targets: .* of which some are no linear"
    ):
        refuse(adapted, embedded)


def test_weights_that_something_else_has_divided_are_refused() -> None:
    """Their gradients would be wrong without an error."""
    model = build_model("llama")
    model.lm_head.weight.placements = ()
    with raises_code("weights-divided"):
        Learner(model, settings().learn, settings().loss, length_constant=7)


def test_a_rank_on_another_host_is_dead_after_a_minute_of_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Store(dict[str, bytes]):
        def check(self, keys: list[str]) -> bool:
            return keys[0] in self

    now = [100.0]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: now[0])
    store = Store()
    peer = ranks.Peer(3, ranks.Hello("elsewhere", 17, "torch", "code", "{}", "another"), store)
    assert peer.name == "rank 3 (elsewhere, process 17)" and not peer.has_ended
    now[0] += 59.0
    assert not peer.has_ended
    store["beat/3"] = b"1"
    now[0] += 59.0
    assert not peer.has_ended
    now[0] += 61.0
    assert peer.has_ended and "no last words" in peer.last_words
    store["beat/3"] = b"2"
    assert not peer.has_ended
    store["words/3"] = b"OutOfMemoryError: 3 GB"
    # Nothing comes after them.
    assert peer.has_ended
    assert peer.last_words == "its last words: OutOfMemoryError: 3 GB"


def test_a_rank_whose_leader_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        num_looks = 0

        def set(self, *_: str) -> None: ...

        def check(self, _: list[str]) -> bool:
            self.num_looks += 1
            assert self.num_looks < 1000, "it waits for a value that never comes"
            return False

    monkeypatch.setattr(ranks, "LOOK_S", 0.0)
    monkeypatch.setattr(ranks.time, "sleep", lambda _: None)
    mine = object.__new__(ranks.Ranks)
    mine._store, mine._num_shared, mine.rank = Store(), 0, 1
    mine._peers = [SimpleNamespace(name="rank 0 (here, process 7)", has_ended=True)]
    with raises_code("leader-gone", match="rank 0 .* has ended without a last word"):
        mine.share()


@pytest.mark.parametrize(
    ("meeting", "num_here", "listens_on"),
    [("env://", "2", "lo"), ("env://", "1", None), ("file:///nowhere", "1", "lo")],
)
def test_ranks_of_one_machine_listen_on_loopback_alone(
    meeting: str, num_here: str, listens_on: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MetError(Exception): ...

    def meet(*_: Any, **__: Any) -> Any:
        raise MetError

    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # Set and taken away, so that it is gone again behind the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", num_here)
    monkeypatch.setattr(ranks._untyped, "rendezvous", meet)
    with pytest.raises(MetError):
        ranks.Ranks(settings(), meeting)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == listens_on
    assert os.environ.get("NCCL_SOCKET_IFNAME") == listens_on


@given(st.lists(recorded_trees(), max_size=3))
def test_trees_reach_the_other_ranks_as_they_are(trees: list[Tree]) -> None:
    texts, columns = packed(trees)
    assert unpacked(texts, columns) == trees
    # An id takes at least two bytes, and what the engine says of a sampled token at least eight;
    # at most eight each with the learner's three, and one byte a column.
    steps = [step for tree in trees for step in tree.steps]
    ids = sum(len(step.token_ids) + len(step.lesson_ids) for step in steps)
    sampled = sum(sum(step.sampled_mask) for step in steps)
    assert 2 * ids + 8 * sampled <= columns.numel() <= 8 * ids + 40 * sampled + 7 * len(steps)


def test_a_reader_that_gives_up_leaves_no_tensor_ungathered() -> None:
    """The other ranks gather all of them, and wait for the next value afterwards."""
    gathered: list[int] = []
    shared: list[Any] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            gathered.append(number)
            yield f"{number}", torch.zeros(1)

    ranks = SimpleNamespace(share=shared.append, blaming=nullcontext)
    learner = SimpleNamespace(ranks=ranks, stream=stream, names=(), fingerprint=lambda: "one")
    reader = iter(StreamedWeights(cast(Any, learner)))
    next(reader)
    del reader
    assert gathered == [0, 1, 2, 3] and shared == [True]


def test_a_new_reference_replaces_that_of_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks, stopped before the first update, leave two files; one goes on."""
    for name in ("reference-00001-of-00002", "reference-00002-of-00002"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"of two ranks")
    learner = Learner(build_model("llama"), settings().learn, settings().loss, length_constant=7)
    learner.keep_reference(tmp_path, is_new=True)
    assert [path.name for path in tmp_path.iterdir()] == ["reference.safetensors"]
    learner.keep_reference(tmp_path, is_new=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_s_own_reader_loads_the_files_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchtitan loads such folders by it, and verl by transformers, as `from_pretrained` does
    here; the optimiser's rows lie in a folder beside."""
    monkeypatch.setattr(sharded, "FILE_BYTES", 10_000)
    model = build_model("llama")
    weights = dict(model.named_parameters())
    files = sharded._ModelFiles(tmp_path, model)
    for name, tensor in weights.items():
        files.add(name, tensor)
    files.close()
    (tmp_path / "treegraft").mkdir()
    save_file({"moment": torch.ones(1)}, tmp_path / "treegraft" / "optimiser.safetensors")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    found = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    checkpoint.load(
        found, storage_reader=checkpoint.HuggingFaceStorageReader(str(tmp_path)), no_dist=True
    )
    loaded = type(model).from_pretrained(tmp_path).state_dict()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor) and torch.equal(loaded[name], tensor), name
