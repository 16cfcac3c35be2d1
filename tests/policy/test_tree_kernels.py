"""The learner's compiled attention over packed trees against softmax in float64, and what happens
where there is none."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.examples import at_most
from tests.support.families import build_model
from tests.support.slow_learner import example_trees

from treegraft.core.errors import KernelError
from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.kernels.trees import TreeKernels, TreeRuns
from treegraft.policy.learn import tree_attention as module
from treegraft.policy.learn.dense import subtree_ends
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import Node, PackedTree, pack_trees
from treegraft.policy.learn.tree_attention import PackedPlan, tree_kernels
from treegraft.settings.policy import LearnSettings, LossSettings


def compiled(width: int, dtype: torch.dtype) -> TreeKernels:
    try:
        is_usable = TreeKernels(width, dtype).is_usable
    except KernelError:
        is_usable = False
    if not is_usable:
        pytest.skip("no C compiler, or no kernels for this processor")
    found = tree_kernels(width, dtype, "cpu")
    assert found is not None, "kernels that can be used are not"
    return found


def random_nodes(draw: random.Random, start: int, depth: int) -> list[Node]:
    """A node of 1 to 150 tokens, most of them short, with up to three branches."""
    end = start + draw.choice([1, 2, 3, 7, 16, 63, 64, 65, 150])
    below: list[Node] = []
    for _ in range(draw.randint(0, 3) if depth else 0):
        below += random_nodes(draw, below[-1].subtree_end if below else end, depth - 1)
    return [Node(start, end, max([end, *(node.subtree_end for node in below)])), *below]


def random_batch(seed: int, num_trees: int) -> list[Node]:
    draw = random.Random(seed)
    nodes = list[Node]()
    for _ in range(num_trees):
        nodes += random_nodes(draw, max((node.subtree_end for node in nodes), default=0), 3)
    return nodes


def softmax_of(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, nodes: list[Node], scaling: float
) -> torch.Tensor:
    count = query.shape[1]
    ends = subtree_ends(PackedTree(0, count, tuple(nodes)), torch.device("cpu"))
    index = torch.arange(count)
    seen = (index <= index[:, None]) & (index[:, None] < ends)
    key, value = (x.repeat_interleave(query.shape[0] // key.shape[0], dim=0) for x in (key, value))
    scores = (query @ key.transpose(1, 2) * scaling).masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ value).transpose(0, 1)


@at_most(25)
@given(
    st.integers(0, 10_000),
    st.integers(1, 3),
    st.tuples(st.sampled_from([2, 8, 16, 40, 64, 112]), st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 3),
    st.booleans(),
)
def test_outputs_and_gradients(
    seed: int,
    num_trees: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    num_threads: int,
    is_by_token: bool,
) -> None:
    """Random batches of random trees, strided as a model's layers give them or not."""
    width, kv_heads, group = shape
    kernels = compiled(width, dtype)
    nodes = random_batch(seed, num_trees)
    count = nodes[-1].subtree_end if num_trees == 1 else max(node.subtree_end for node in nodes)
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads: int) -> torch.Tensor:
        x = torch.randn(count, heads, width, generator=generator).to(dtype).transpose(0, 1)
        return (x if is_by_token else x.contiguous()).requires_grad_()

    inputs = (drawn(kv_heads * group), drawn(kv_heads), drawn(kv_heads))
    upstream = drawn(kv_heads * group).detach().transpose(0, 1)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        runs = TreeRuns(nodes, count, num_threads)
        out = kernels.attend(*inputs, runs, width**-0.5)
        grads = torch.autograd.grad(out, inputs, upstream)
    finally:
        torch.set_num_threads(before)
    expected = softmax_of(*exact, nodes, width**-0.5)
    wanted = torch.autograd.grad(expected, exact, upstream.double())
    limit = 5e-6 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip((out, *grads), (expected, *wanted), strict=True):
        # Slopes are small differences of larger numbers, which are rounded.
        size = theirs.detach().norm() + theirs.numel() ** 0.5
        assert (ours.detach().double() - theirs.detach()).norm() <= limit * size


def test_numbers_do_not_depend_on_what_else_is_packed() -> None:
    """A tree alone, and after another whose length is no multiple of a tile: the same bits
    forward."""
    kernels = compiled(16, torch.float32)
    nodes = random_batch(3, 1)
    count = nodes[0].subtree_end
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, count + 37, 16, generator=generator) for _ in range(3))
    both = [Node(0, 37, 37), *(Node(n.start + 37, n.end + 37, n.subtree_end + 37) for n in nodes)]
    together = kernels.attend(query, key, value, TreeRuns(both, count + 37, 1), 0.25)
    alone = kernels.attend(
        *(x[:, 37:].contiguous() for x in (query, key, value)), TreeRuns(nodes, count, 1), 0.25
    )
    assert torch.equal(together[37:], alone)


def test_tensors_of_another_type_or_shape_do_not_reach_the_c_code() -> None:
    try:
        kernels = TreeKernels(16, torch.float32)
    except KernelError:
        pytest.skip("no C compiler")
    runs = TreeRuns([Node(0, 3, 3)], 3, 1)
    right = [torch.ones(heads, 3, 16) for heads in (2, 1, 1)]
    out = torch.ones(3, 2, 16)
    lse = torch.ones(2, 3)
    grad = torch.ones(3, 2, 16)
    # Where there are kernels for this processor they answer; where not, they have no memory.
    with nullcontext() if kernels.is_usable else pytest.raises(MemoryError):
        kernels.backward(right, out, lse, grad, runs, 1.0)
    for wrong in (torch.ones(1, 3, 16).double(), torch.ones(1, 3, 32), torch.ones(1, 4, 16)):
        for place in range(3):
            inputs = [*right[:place], wrong, *right[place + 1 :]]
            with pytest.raises(ValueError, match=r"kernels: got|attention: "):
                kernels.forward(inputs, runs, 1.0)
    for wrongs in ((out.double(), lse, grad), (out, lse.double(), grad), (out, lse, grad.double())):
        with pytest.raises(ValueError, match="kernels: got"):
            kernels.backward(right, *wrongs, runs, 1.0)


# ---------------------------------------------------------------------- where there are none


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """An empty cache folder, and nothing compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module._tree_kernels.cache_clear()
    yield tmp_path
    module._tree_kernels.cache_clear()


def learn_once() -> float:
    learner = Learner(build_model("llama"), LearnSettings(), LossSettings(), length_constant=7)
    scores, _ = learner.scores(pack_trees(example_trees(2)))
    scores.sum().backward()
    return float(scores.detach().sum())


def test_without_a_compiler_torchs_operators_do_it(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", "/does/not/exist")
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.WARNING):
        found = learn_once()
        learn_once()
    assert (
        caplog.text.count("no C compiler was found") == 1
        and "attention over trees takes torch's operators" in caplog.text
    )
    monkeypatch.undo()
    module._tree_kernels.cache_clear()
    assert found == pytest.approx(learn_once(), abs=1e-4)


def test_kernels_that_are_off_are_not_used(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(8, torch.float32)
    module._tree_kernels.cache_clear()
    right = TreeKernels.backward
    for factor, notice in (
        (1.01, "our kernels are off by 0.01"),
        (math.nan, "our kernels are off by nan"),
    ):
        spoilt = (1.0, 1.0, factor)
        monkeypatch.setattr(
            TreeKernels,
            "backward",
            lambda *args, by=spoilt: tuple(
                f * grad for f, grad in zip(by, right(*args), strict=True)
            ),
        )
        with caplog.at_level(logging.WARNING):
            assert tree_kernels(8, torch.float32, "cpu") is None
        assert notice in caplog.text
        module._tree_kernels.cache_clear()


def test_values_of_another_width_or_type_take_torchs_operators() -> None:
    """Latent attention has narrower values, autocast leaves mixed types; both run, and a width of
    values is kept."""
    batch = pack_trees(example_trees(1))
    count = len(batch.token_ids)
    query, key, value = torch.randn(3, 2, count, 8, generator=torch.Generator().manual_seed(0))
    options = AttentionOptions(0.3, None, None, None)
    whole, narrow = (
        PackedPlan(batch).attend(0, query, key, some, options) for some in (value, value[..., :6])
    )
    torch.testing.assert_close(narrow, whole[..., :6])
    assert PackedPlan(batch)._kernels(query, key, value.bfloat16(), options) is None


def test_the_proof_runs_in_inference_mode_too(fresh: Path) -> None:
    with torch.inference_mode():
        assert (
            tree_kernels(8, torch.float32, "cpu") is not None or compiled(8, torch.float32) is None
        )


def test_one_thread_of_ours_is_no_match_for_many(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    compiled(8, torch.float32)
    module._tree_kernels.cache_clear()
    monkeypatch.setattr("treegraft.policy.kernels.library.shares_runtime", lambda _: False)
    assert tree_kernels(8, torch.float32, "cpu") is None


def test_other_devices_and_types_have_none() -> None:
    assert (
        tree_kernels(8, torch.float32, "cuda") is None
        and tree_kernels(8, torch.float16, "cpu") is None
    )
    assert tree_kernels(7, torch.float32, "cpu") is None
