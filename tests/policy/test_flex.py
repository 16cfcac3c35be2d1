"""FlexAttention over packed trees: exact against a dense mask, refused where it is not.
test_packed_equals_separate runs the laws through it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.trees import Part, build_tree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

from treegraft.policy.attention_hook import AttentionOptions
from treegraft.policy.learn import flex as flex_module
from treegraft.policy.learn import tree_attention as attention
from treegraft.policy.learn.dense import AttentionShape, dense_attend, probe_tree, tree_mask
from treegraft.policy.learn.flex import (
    BLOCK,
    PROOF_TOKENS,
    Proof,
    compiled_flex,
    flex_attend,
    flex_distance,
    padding_nodes,
    paths_of,
    prove_flex,
    proven_flex,
    tree_block_mask,
)
from treegraft.policy.learn.pack import Node, PackedTree, TreeBatch, columns_of, pack_trees
from treegraft.policy.learn.scores import token_scores
from treegraft.policy.learn.tree_attention import PackedPlan

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # of torch: FlexAttention is not compiled here

CPU = torch.device("cpu")
SHAPE = AttentionShape(4, 2, 16)


@pytest.fixture(autouse=True)
def _backward_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Not compiled FlexAttention runs backward on a CPU as well, though it says no."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    proven_flex.cache_clear()
    yield
    proven_flex.cache_clear()


def seen_by(nodes: list[Node], window: int | None) -> list[str]:
    total = nodes[-1].end
    count = torch.arange(total)
    mask = tree_block_mask([*nodes, *padding_nodes(total, -total % BLOCK)], window)
    seen: torch.Tensor = mask.mask_mod(None, None, count[:, None], count[None])  # type: ignore[arg-type]
    return ["".join("x" if x else "." for x in row) for row in seen.tolist()]


def test_a_mask_by_hand() -> None:
    """A prompt of two tokens with branches of two and one, and another tree of one token."""
    nodes = [Node(0, 2, 5), Node(2, 4, 4), Node(4, 5, 5), Node(5, 6, 6)]
    assert [len(path) for path in paths_of(nodes)] == [1, 2, 2, 1]
    assert seen_by(nodes, None) == [
        "x.....",
        "xx....",
        "xxx...",
        "xxxx..",
        "xx..x.",
        ".....x",
    ]
    assert seen_by(nodes, 2) == [
        "x.....",
        "xx....",
        ".xx...",
        "..xx..",
        ".x..x.",
        ".....x",
    ]


@st.composite
def forests(draw: st.DrawFn) -> list[Node]:
    """Nodes of one to three trees in depth-first order; some of whole blocks, where full squares
    are."""
    lengths = st.one_of(st.integers(1, 300), st.sampled_from([1, 127, 128, 129, 256, 384]))
    nodes: list[Node] = []

    def add(depth: int) -> None:
        start = nodes[-1].end if nodes else 0
        place = len(nodes)
        nodes.append(Node(start, start + draw(lengths), 0))
        for _ in range(draw(st.integers(0, 3)) if depth else 0):
            add(depth - 1)
        nodes[place] = nodes[place]._replace(subtree_end=nodes[-1].end)

    for _ in range(draw(st.integers(1, 3))):
        add(2)
    return nodes


COLUMNS = ("num_blocks", "indices")


@given(forests(), st.sampled_from([None, 1, 2, 100, 128, 300]))
@settings(max_examples=15, deadline=None)
def test_masks_from_intervals_are_those_of_every_pair(
    nodes: list[Node], window: int | None
) -> None:
    nodes += padding_nodes(nodes[-1].end, -nodes[-1].end % BLOCK)
    ours = tree_block_mask(nodes, window)
    total = nodes[-1].end
    theirs = create_block_mask(ours.mask_mod, None, None, total, total, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        for column in COLUMNS:
            name = f"{kind}_{column}"
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert ours.seq_lengths == theirs.seq_lengths


@pytest.mark.parametrize(
    "shape",
    [SHAPE, AttentionShape(6, 2, 16, window=40), AttentionShape(2, 2, 16, softcap=2.0)],
)
def test_outputs_and_gradients_are_those_of_a_dense_mask(shape: AttentionShape) -> None:
    assert flex_distance(flex_attention, shape, torch.float32, CPU, 401) < 1e-5


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch's compiler traces FlexAttention as on a GPU, and writes no program for this CPU."""
    real = torch.compile

    def compile_(function: Any, **options: Any) -> Any:
        if function is flex_attention:
            options["backend"] = "eager"
        return real(function, **options)

    monkeypatch.setattr(torch, "compile", compile_)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("only_traced")
def test_a_process_may_have_more_programs_than_torch_allows() -> None:
    """The ninth comes in another thread, as where a layer is computed again."""

    def problem(width: int) -> str:
        return proven_flex(AttentionShape(2, 1, width), torch.float32, CPU, 401).problem

    problems = [problem(width) for width in range(8, 72, 8)]
    with ThreadPoolExecutor(1) as thread:
        problems.append(thread.submit(problem, 72).result())
    assert problems == [""] * 9


@pytest.mark.usefixtures("only_traced")
def test_a_cap_of_scores_can_be_compiled() -> None:
    for cap in (2.0, 50):
        shape = AttentionShape(2, 2, 16, window=40, softcap=cap)
        assert proven_flex(shape, torch.float32, CPU, 401).problem == ""


def test_a_path_too_long_for_a_mask_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes alone: the refusal comes before anything is computed."""
    tree = PackedTree(0, 4097, (Node(0, 4097, 4097),))
    monkeypatch.setattr(attention, "proven_flex", lambda *_: Proof(None, "FlexAttention failed"))
    columns = dict.fromkeys(columns_of(TreeBatch), torch.zeros(0, dtype=torch.long))
    with FakeTensorMode(allow_non_fake_inputs=True):
        columns["token_ids"] = columns["position_ids"] = torch.zeros(
            4097, dtype=torch.long, device="cuda"
        )
        plan = PackedPlan(TreeBatch(**columns, trees=(tree,), paths=()))
        assert plan.num_padding == 127 and plan.inputs[0].shape == (4224,)
        query = torch.zeros(4, 4224, 16, device="cuda")
        for sinks, why in ((None, "FlexAttention failed"), (torch.zeros(4), "attention sinks")):
            options = AttentionOptions(0.25, None, None, sinks)
            with raises_code("tree-too-long", match=rf"4,097 tokens .* at most 4,096: .*{why}"):
                plan.attend(0, query, query, query, options)


@pytest.mark.parametrize(
    ("made", "notice"),
    [
        (lambda flex: lambda *a, **o: 1.01 * flex(*a, **o), "FlexAttention is off by 0.01"),
        (lambda _: 1 / 0, "FlexAttention failed with ZeroDivisionError: division by zero"),
    ],
)
def test_what_fails_or_is_off_is_not_used(
    made: Callable[[Any], Any],
    notice: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    compiled = torch.compile
    makers: list[Callable[[Any], Any]] = [lambda flex: flex]

    def compile_(function: Any, **options: Any) -> Any:
        # FlexAttention itself compiles something.
        return makers[-1](function) if function is flex_attention else compiled(function, **options)

    monkeypatch.setattr(torch, "compile", compile_)
    assert proven_flex(SHAPE, torch.float32, CPU, 401).flex is flex_attention
    proven_flex.cache_clear()
    makers.append(made)
    with caplog.at_level(logging.WARNING):
        assert proven_flex(SHAPE, torch.float32, CPU, 401).flex is None
    assert notice in caplog.text and "gathered keys" in caplog.text


def test_what_lacks_memory_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing of FlexAttention: the next try may have more."""
    compiled = torch.compile

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    makers = [full, lambda *a, **o: flex_attention(*a, **o)]
    monkeypatch.setattr(
        torch, "compile", lambda f, **o: makers[0] if f is flex_attention else compiled(f, **o)
    )
    with pytest.raises(torch.OutOfMemoryError):
        proven_flex(SHAPE, torch.float32, CPU, 401)
    del makers[0]
    assert proven_flex(SHAPE, torch.float32, CPU, 401).flex is makers[0]


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
def test_the_proof_before_any_work_is_of_the_heads_that_passes_ask_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a model's layers call our attention with, windows and caps included."""
    model = build_model(name)
    asked = set()
    monkeypatch.setattr(
        flex_module,
        "proven_flex",
        lambda shape, *rest: asked.add((shape, *rest)) or Proof(None, ""),
    )
    prove_flex(model.config.get_text_config(), torch.float32, CPU)
    called = set()

    class Spy(PackedPlan):
        def attend(self, layer: int, q: Any, k: Any, v: Any, options: AttentionOptions) -> Any:
            own = AttentionShape(
                q.shape[0], k.shape[0], q.shape[-1], options.window, options.softcap
            )
            called.add((own, q.dtype, q.device, PROOF_TOKENS))
            return super().attend(layer, q, k, v, options)

    monkeypatch.setattr("treegraft.policy.learn.scores.PackedPlan", Spy)
    token_scores(model, pack_trees([build_tree(Part("tt", children=(Part("pp"), Part("ppp"))))]))
    assert called and called == asked


def test_the_proof_needs_gradients_wherever_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without gradients, and within a layer whose activations are computed again."""
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: f if f is flex_attention else compiled(f, **options)
    )
    with torch.no_grad():
        assert proven_flex(SHAPE, torch.float32, CPU, 401).flex is flex_attention
    proven_flex.cache_clear()

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        assert proven_flex(SHAPE, torch.float32, CPU, 401).flex is flex_attention
        return y.sin()

    x = torch.ones(3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(x.sin().sin().sum(), x)[0])


@pytest.mark.smoke
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
def test_compiled_on_a_cpu() -> None:
    """Without gradients and windows, which torch compiles for a GPU alone. Twenty seconds."""
    shape = AttentionShape(2, 1, 16, softcap=2.0)
    tree = probe_tree(384)
    query, key, value = (torch.randn(heads, 384, 16) for heads in (2, 1, 1))
    with torch.no_grad():
        blocks = tree_block_mask(tree.nodes, None)
        found = flex_attend(compiled_flex(), query, key, value, blocks, shape.options)
    places = tree_mask(tree, torch.zeros(384, dtype=torch.long), None).sum(dim=1) - 1
    mask = tree_mask(tree, places, None)
    torch.testing.assert_close(found, dense_attend(query, key, value, mask, shape.options))
