"""Recorded decoding steps. On a CPU a step is recorded as a list of operators on tensors, which is
what a CUDA graph is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.families import build_model
from tests.test_engine import assert_traffic_agrees, complete_one, greedy, ids_of, make_engine
from torch.fx.experimental.proxy_tensor import make_fx

from treegraft.policy.engine import graphs
from treegraft.policy.engine.graphs import RecordedForward, Recorder, Run, recorder_maker

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Counted:
    """Records by tracing, and counts."""

    def __init__(self) -> None:
        self.num_recorded = self.num_played = 0

    def __call__(self, run: Run) -> Run:
        traced = make_fx(lambda: run())()
        self.num_recorded += 1

        def play() -> torch.Tensor:
            self.num_played += 1
            return traced()

        return play


def use(patch: pytest.MonkeyPatch, record: Recorder) -> None:
    patch.setattr("treegraft.policy.engine.native.recorder_maker", lambda _: lambda: record)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    found = Counted()
    use(monkeypatch, found)
    yield found


@pytest.mark.parametrize("seed", [0, 1])
def test_random_traffic_agrees_with_plain_forward_passes(seed: int, counted: Counted) -> None:
    """Rows that come and go, weights that change, a cache that grows and moves."""
    assert_traffic_agrees(seed, compile_kernels=False)
    assert counted.num_played > 2 * counted.num_recorded > 0


def test_a_step_is_recorded_once_for_so_many_blocks(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 tokens and 60 more lie in two blocks, then in three, for which four are recorded.

    The prompt's step is not played, and neither is the first one of each recording.
    """
    monkeypatch.setattr(graphs, "FIRST_BLOCKS", 2)
    plain = complete_one(make_engine(compile_kernels=False), ids_of(100, 1), greedy(60))
    assert counted.num_recorded == 2 and counted.num_played == 59 - 2
    monkeypatch.undo()
    assert (
        complete_one(make_engine(compile_kernels=False), ids_of(100, 1), greedy(60)).token_ids
        == plain.token_ids
    )


def frozen(run: Run) -> Run:
    """What is played ignores the tokens, as where nothing was recorded."""
    found = run()
    return lambda: found


@pytest.mark.parametrize(
    ("spoil", "notice"),
    [
        (lambda run: lambda: 1.01 * run(), "states played back differ by 0.01"),
        (lambda run: lambda: float("nan") * run(), "states played back differ by nan"),
        (frozen, "states played back differ"),
        (
            lambda run: exec(
                "raise RuntimeError('operation not permitted when stream is capturing')"
            ),
            "operation not permitted",
        ),
    ],
)
def test_recordings_that_fail_or_differ_are_not_used(
    spoil: Callable[[Run], Any],
    notice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = complete_one(make_engine(compile_kernels=False), ids_of(9, 1), greedy(8))
    use(monkeypatch, spoil)
    with caplog.at_level(logging.WARNING):
        found = complete_one(make_engine(compile_kernels=False), ids_of(9, 1), greedy(8))
    assert found.token_ids == expected.token_ids
    assert caplog.text.count("run without CUDA graphs") == 1 and notice in caplog.text


@pytest.mark.parametrize("is_hidden", [False, True])
def test_memory_that_runs_out_ends_one_recording_until_the_weights_change(
    is_hidden: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of a recording may hide the error behind another one."""
    num_tried = 0

    def record(run: Run) -> Run:
        nonlocal num_tried
        num_tried += 1
        try:
            raise torch.OutOfMemoryError("CUDA out of memory")
        except torch.OutOfMemoryError:
            if is_hidden:
                raise RuntimeError("operation failed during capture") from None
            raise

    expected = complete_one(make_engine(compile_kernels=False), ids_of(9, 1), greedy(8))
    use(monkeypatch, record)
    engine = make_engine(compile_kernels=False)
    forward = engine._forward
    assert isinstance(forward, RecordedForward)
    found = complete_one(engine, ids_of(9, 1), greedy(8))
    assert found.token_ids == expected.token_ids
    assert num_tried == 1 and forward._too_large and "without CUDA graphs" not in caplog.text
    forward.refresh()
    assert not forward._too_large


def test_large_steps_are_not_recorded(counted: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of four blocks is one more than there may be."""
    monkeypatch.setattr(graphs, "MAX_COPIED", 3)
    complete_one(make_engine(compile_kernels=False), ids_of(9, 1), greedy(8))
    assert counted.num_recorded == 0


def test_nothing_is_recorded_on_a_cpu() -> None:
    assert recorder_maker(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    model = build_model("llama").to("cuda")
    engine = make_engine(model=model)
    expected = complete_one(make_engine(), ids_of(70, 1), greedy(80))
    found = complete_one(engine, ids_of(70, 1), greedy(80))
    assert found.token_ids == expected.token_ids
    forward = engine._forward
    assert isinstance(forward, RecordedForward) and forward._recordings and not forward._is_off


def test_a_decoding_step_takes_two_copies_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids, positions and blocks in one, what is drawn by in the other."""
    from treegraft.policy.engine import ragged, sampling, transfer

    engine = make_engine(compile_kernels=False)
    copied: list[int] = []

    def counted(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
        copied.append(numbers.numel())
        return transfer.moved(numbers, device)

    for module in (ragged, sampling):
        monkeypatch.setattr(module, "moved", counted)
    done = complete_one(engine, ids_of(9, 1), greedy(8))
    assert len(copied) == 2 * len(done.token_ids) > 2
