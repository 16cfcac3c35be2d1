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
from tests.distributed.laws import settings, some_trees
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.trees import recorded_trees

from treegraft.core.types import Tree
from treegraft.policy.deal import deal
from treegraft.policy.learn import ranks
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.plan import plan_passes
from treegraft.policy.learn.sent_trees import packed, unpacked
from treegraft.policy.learn.sharded import StreamedWeights, refuse
from treegraft.policy.learn.torchrun import num_ranks
from treegraft.policy.load import with_adapters
from treegraft.settings.load import config_json


def test_passes_are_dealt_longest_first() -> None:
    # 9 to the first, 7 and 5 to the second, 4 to the first (9 < 12), 3 to the second, 2 to the
    # first: 15 and 15.
    assert deal([4, 9, 2, 7, 3, 5], 2) == (0, 0, 0, 1, 1, 1)
    assert deal([1, 1, 1], 3) == (0, 1, 2) and deal([], 4) == ()


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
        ({"software": "torch 2.12.0"}, "rank 1 on b: got torch 2.12.0, expected .* torch 2.13"),
    ],
)
def test_ranks_of_other_software_are_refused(changed: dict[str, str], said: str) -> None:
    own = settings()
    first = ranks.Hello("a", 1, "torch 2.13.0", config_json(own), "")
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


def test_a_rank_on_another_host_has_ended_once_it_left_last_words() -> None:
    class Store(dict[str, bytes]):
        def check(self, keys: list[str]) -> bool:
            return keys[0] in self

    store = Store()
    peer = ranks.Peer(3, ranks.Hello("elsewhere", 17, "torch", "{}", "another"), store)
    assert peer.name == "rank 3 (elsewhere, process 17)" and not peer.has_ended
    assert "no last words" in peer.last_words
    store["words/3"] = b"OutOfMemoryError: 3 GB"
    assert peer.has_ended and peer.last_words == "its last words: OutOfMemoryError: 3 GB"


def test_a_rank_whose_leader_is_gone_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store:
        num_looks = 0

        def check(self, _: list[str]) -> bool:
            self.num_looks += 1
            assert self.num_looks < 1000, "it waits for a value that never comes"
            return False

    monkeypatch.setattr(ranks, "LOOK_S", 0.0)
    monkeypatch.setattr(ranks.time, "sleep", lambda _: None)
    mine = object.__new__(ranks.Ranks)
    mine._store = Store()
    mine._num_shared = 0
    mine.rank = 1
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
