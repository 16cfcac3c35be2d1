"""Log-probabilities and entropies: chunks of the vocabulary, gradients of the formulas, the
attention that is put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.error_codes import raises_code
from tests.support.families import build_model
from tests.support.slow_learner import (
    distance,
    example_trees,
    make_learner,
)

from treegraft.policy.learn import scores as scores_module
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.scores import token_scores
from treegraft.policy.load import with_adapters
from treegraft.settings.policy import LearnSettings, LossSettings, ModelSettings

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_vocabulary_chunks_change_nothing(chunk: int) -> None:
    model = build_model("llama")
    batch = pack_trees(example_trees(2))
    whole = token_scores(model, batch)
    parts = token_scores(model, batch, vocab_chunk=chunk)
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    ours, theirs = (
        [t.clone() for t in torch.autograd.grad(s[0].sum() + s[1].sum(), list(model.parameters()))]
        for s in (parts, whole)
    )
    assert (
        distance(torch.cat([t.flatten() for t in ours]), torch.cat([t.flatten() for t in theirs]))
        < 1e-5
    )


@pytest.mark.parametrize("used", ["logprobs", "entropies", "both"])
@pytest.mark.parametrize("cached", [1, 64, 1 << 20])
def test_scores_and_their_gradients_are_those_of_the_formulas(
    used: str, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against automatic differentiation in float64, a row, a few rows and all rows at a time."""
    monkeypatch.setattr(scores_module, "_CACHED", cached)
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(7, 5, generator=draw)
    weight = torch.randn(19, 5, generator=draw) * 3
    targets = torch.randint(0, 19, (7,), generator=draw)
    temperatures = torch.rand(7, generator=draw) + 0.5
    parts = {"logprobs": [1, 0], "entropies": [0, 1], "both": [1, 1]}
    upstream = torch.randn(2, 7, generator=draw) * torch.tensor(parts[used])[:, None]

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(dtype).clone().requires_grad_() for tensor in (hidden, weight)]

        def head(rows: torch.Tensor) -> torch.Tensor:
            return rows @ leaves[1].T

        if dtype == torch.float64:
            logs = torch.log_softmax(head(leaves[0]) / temperatures.double()[:, None], dim=-1)
            columns = logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1)
        else:
            columns = scores_module.chunked_scores(head, leaves[0], targets, temperatures, 4)  # type: ignore[arg-type]
        total = sum(
            (column * g.to(column)).sum()
            for column, g in zip(columns, upstream, strict=True)
            if g.any()
        )
        return (*(column.detach() for column in columns), *torch.autograd.grad(total, leaves))  # type: ignore[arg-type]

    for ours, exact in zip(gradients(torch.float32), gradients(torch.float64), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=2e-5)


def test_the_attention_comes_back_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("llama")
    before = model.config._attn_implementation
    batch = pack_trees(example_trees(1))
    token_scores(model, batch)
    assert model.config._attn_implementation == before

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(scores_module, "packed_hidden", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        token_scores(model, batch)
    assert model.config._attn_implementation == before
    model(input_ids=torch.tensor([[3, 4]]))


def test_scores_of_a_model_in_training_hands() -> None:
    """`Learner` keeps its attention installed; `token_scores` on its model is still right."""
    model = build_model("llama")
    twin = build_model("llama")
    Learner(model, LearnSettings(), LossSettings(), length_constant=7)
    batch = pack_trees(example_trees(2))
    with torch.no_grad():
        torch.testing.assert_close(
            token_scores(model, batch)[0], token_scores(twin, batch)[0], atol=1e-6, rtol=0
        )


def test_an_unknown_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("granite")
    monkeypatch.setattr(
        "treegraft.policy.output_head.OutputHead.__call__",
        lambda self, hidden: self._project(hidden),
    )
    with raises_code("model-not-trainable"):
        token_scores(model, pack_trees(example_trees(1)))


def test_gradient_checkpointing_changes_no_gradient() -> None:
    trees = example_trees(3)
    gradients = []
    for is_on in (False, True):
        model = build_model("llama")
        model = with_adapters(model, ModelSettings(gradient_checkpointing=is_on), seed=0)
        learner, descent = make_learner(model)
        learner.learn(trees)
        gradients.append(descent.gradients[0])
    assert gradients[0].any()
    assert distance(gradients[1], gradients[0]) < 1e-6
