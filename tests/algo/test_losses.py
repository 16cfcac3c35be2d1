"""Losses by hand: values and gradients."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from treegraft.algo.loss import (
    ImitatedBatch,
    LossBatch,
    LossForm,
    PassScores,
    loss_terms,
    total_loss,
)
from treegraft.algo.losses import (
    Denominators,
    clipped_surrogate,
    contribution_weights,
    engine_correction,
    imitated_loss,
    k3_divergence,
)


def surrogate(
    ratio: float, advantage: float, dual_clip: float | None = None, shaping: float | None = None
) -> tuple[float, float, bool]:
    """Loss, its derivative after the new log-probability, and whether it was clipped, at clip 0.2
    low and 0.3 high."""
    column = partial(torch.tensor, dtype=torch.float64)
    new = column([math.log(ratio)]).requires_grad_()
    terms = clipped_surrogate(
        new,
        column([0.0]),
        column([advantage]),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
        shaping=None if shaping is None else column([shaping]),
    )
    terms.losses.sum().backward()
    assert new.grad is not None
    # ρ, whatever the shaping; its logarithm is held at 20.
    assert float(terms.ratios) == pytest.approx(min(ratio, math.exp(20.0)))
    return float(terms.losses.detach()), float(new.grad), bool(terms.is_clipped)


DUAL = {"dual_clip": 3.0}
SHAPED = {"shaping": 1.25}
BOTH = {"dual_clip": 2.5, "shaping": 1.25}


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        # l = -ρA inside the trust region; dl/dlogπ = -ρA.
        ({}, 1.0, 2.0, -2.0, -2.0, False),
        ({}, 1.1, 2.0, -2.2, -2.2, False),
        ({}, 1.0, -2.0, 2.0, 2.0, False),
        # Above it with A > 0: held at 1.3, no gradient. Below it with A > 0: min takes the
        # unclipped side.
        ({}, 1.5, 2.0, -2.6, 0.0, True),
        ({}, 0.5, 2.0, -1.0, -1.0, False),
        # With A < 0 the other way round: held at 0.8 from below, unbounded above.
        ({}, 0.5, -2.0, 1.6, 0.0, True),
        ({}, 1.5, -2.0, 3.0, 3.0, False),
        # Ends differ: 1.25 lies above 1.2 but below 1.3.
        ({}, 1.25, 1.0, -1.25, -1.25, False),
        ({}, 1.4, 0.0, 0.0, 0.0, False),
        (DUAL, 5.0, -2.0, 6.0, 0.0, True),  # c = 3: at most 3 |A|
        (DUAL, 2.9, -2.0, 5.8, 5.8, False),
        (DUAL, 0.5, -2.0, 1.6, 0.0, True),  # the ordinary clip acts first
        (DUAL, 5.0, 2.0, -2.6, 0.0, True),  # for A > 0 there is no dual clip
        # Shaping 1.25 on ends 0.8 and 1.3: the clip acts on 1.25 ρ (RAPO, eq. 11).
        (SHAPED, 1.0, 2.0, -2.5, -2.5, False),
        (SHAPED, 1.1, 2.0, -2.6, 0.0, True),  # 1.375 is held at 1.3, where ρ alone would not be
        (SHAPED, 1.0, -2.0, 2.5, 2.5, False),
        (SHAPED, 0.7, -2.0, 1.75, 1.75, False),  # 0.875 is above 0.8, where ρ alone is below
        (SHAPED, 0.6, -2.0, 1.6, 0.0, True),  # 0.75
        (SHAPED, 0.6, 2.0, -1.5, -1.5, False),
        # Shaping 1.25 and c = 2.5: the bound stands at ρ = 2.
        (BOTH, 1.9, -2.0, 4.75, 4.75, False),
        (BOTH, 2.0, -2.0, 5.0, 5.0, False),  # a tie keeps the gradient
        (BOTH, 2.1, -2.0, 5.0, 0.0, True),
    ],
)
def test_clipping(
    options: dict[str, float],
    ratio: float,
    advantage: float,
    loss: float,
    gradient: float,
    is_clipped: bool,
) -> None:
    expected = (pytest.approx(loss), pytest.approx(gradient), is_clipped)
    assert surrogate(ratio, advantage, **options) == expected


@pytest.mark.parametrize(
    ("form", "prob", "advantage", "loss", "gradient"),
    [
        # -c A log π with c = 2: the gradient after log π is -c A.
        ("log", 0.5, 3.0, 6 * math.log(2), -6.0),
        ("log", 0.01, 0.5, math.log(100), -1.0),
        ("log", 0.5, -3.0, 0.0, 0.0),  # what did not pay is not unlearned
        ("log", 0.5, 0.0, 0.0, 0.0),
        # -c A π / (π + γ) with γ = 0.1: the gradient is -c A π γ / (π + γ)^2, largest at π = γ.
        ("luffy", 0.1, 3.0, -3.0, -1.5),
        ("luffy", 0.4, 3.0, -4.8, -0.96),
        ("luffy", 0.9, 1.0, -1.8, -0.18),
        ("luffy", 0.4, -3.0, 0.0, 0.0),
    ],
)
def test_imitated_tokens_by_hand(
    form: str, prob: float, advantage: float, loss: float, gradient: float
) -> None:
    logprob = torch.tensor([math.log(prob)], dtype=torch.float64, requires_grad=True)
    found = imitated_loss(
        logprob, torch.tensor([advantage], dtype=torch.float64), coef=2.0, form=form, gamma=0.1
    )  # type: ignore[arg-type]
    found.sum().backward()
    assert logprob.grad is not None
    assert (float(found.detach()), float(logprob.grad)) == (
        pytest.approx(loss),
        pytest.approx(gradient),
    )


def test_imitated_tokens_of_vanishing_probability_stay_finite() -> None:
    for form in ("log", "luffy"):
        logprob = torch.tensor([-300.0], requires_grad=True)
        found = imitated_loss(logprob, torch.ones(1), coef=1.0, form=form)  # type: ignore[arg-type]
        found.sum().backward()
        assert found.isfinite().all() and logprob.grad is not None and logprob.grad.isfinite().all()


def test_an_absurd_ratio_stays_finite() -> None:
    loss, gradient, _ = surrogate(math.exp(200.0), -1.0)
    assert loss == pytest.approx(math.exp(20.0)) and gradient == 0.0


@pytest.mark.parametrize(
    ("difference", "value", "gradient"),
    [
        # k3 = e^-d + d - 1, dk3/dd = 1 - e^-d
        (0.0, 0.0, 0.0),
        (math.log(2.0), 0.5 + math.log(2.0) - 1.0, 0.5),
        (-math.log(2.0), 2.0 - math.log(2.0) - 1.0, -1.0),
        (-2.6, math.exp(2.6) - 3.6, 1.0 - math.exp(2.6)),  # 9.86: the last of the pull
        (-2.62, 10.0, 0.0),
        (-5.0, 10.0, 0.0),  # e^5 - 6 = 142: held at 10
    ],
)
def test_k3(difference: float, value: float, gradient: float) -> None:
    new = torch.tensor([difference - 1.0], dtype=torch.float64, requires_grad=True)
    divergence = k3_divergence(new, torch.tensor([-1.0], dtype=torch.float64))
    divergence.sum().backward()
    assert new.grad is not None
    assert (float(divergence.detach()), float(new.grad)) == (
        pytest.approx(value),
        pytest.approx(gradient),
    )


def test_aggregations_by_hand() -> None:
    """Two groups: w = (1/2, 1/2) with |y| = (4, 2), and w = (1) with |y| = 3; Σ w|y| = 2 + 1 + 3 =
    6."""
    weights = torch.tensor([0.5, 0.5, 1.0])
    lengths = torch.tensor([4.0, 2.0, 3.0])
    denominators = Denominators(num_groups=2, weighted_tokens=6.0, length_constant=10.0)

    def factors(aggregation: str) -> list[float]:
        return contribution_weights(weights, lengths, denominators, aggregation).tolist()  # type: ignore[arg-type]

    assert factors("token-mean") == pytest.approx([1 / 12, 1 / 12, 1 / 6])
    assert factors("sequence-mean") == pytest.approx([1 / 16, 1 / 8, 1 / 6])
    assert factors("sequence-sum") == pytest.approx([1 / 40, 1 / 40, 1 / 20])


def test_a_path_without_loss_tokens_weighs_nothing() -> None:
    denominators = Denominators(num_groups=1, weighted_tokens=0.0, length_constant=4.0)
    for aggregation in ("token-mean", "sequence-mean", "sequence-sum"):
        factors = contribution_weights(
            torch.tensor([1.0]), torch.tensor([0.0]), denominators, aggregation
        )  # type: ignore[arg-type]
        assert factors.tolist() == [0.0]


def test_what_the_engine_computes_otherwise_is_corrected_up_to_a_cap() -> None:
    """π_old / μ = 0.5 / 0.25 = 2, 0.5 / 0.5 = 1, 0.5 / 0.1 = 5; the cap is 3, and no gradient
    passes through the weight."""
    old = torch.log(torch.tensor([0.5, 0.5, 0.5])).requires_grad_()
    gaps = old - torch.log(torch.tensor([0.25, 0.5, 0.1]))
    weights, is_capped = engine_correction(gaps, 3.0)
    torch.testing.assert_close(weights, torch.tensor([2.0, 1.0, 3.0]))
    assert is_capped.tolist() == [False, False, True] and not weights.requires_grad


def test_the_correction_of_a_sequence_is_the_product_over_its_tokens() -> None:
    """Two trajectories, of two tokens and one, and an empty one between them: 2 · 0.5 = 1, and 5
    at a cap of 3; each of a trajectory's tokens has its weight."""
    old = torch.log(torch.tensor([0.5, 0.25, 0.5])).requires_grad_()
    sampled = torch.log(torch.tensor([0.25, 0.5, 0.1]))
    weights, is_capped = engine_correction(old - sampled, 3.0, torch.tensor([2, 0, 1]))
    torch.testing.assert_close(weights, torch.tensor([1.0, 1.0, 3.0]))
    assert is_capped.tolist() == [False, False, True] and not weights.requires_grad
    empty = torch.zeros(0)
    assert engine_correction(empty, 3.0, torch.tensor([0, 0]))[0].shape == (0,)


def test_the_product_of_a_long_sequence_neither_overflows_nor_drifts() -> None:
    """10,000 tokens off by ± 0.01 nats cancel; off by 0.04 each they are e^400, held at e^20."""
    gaps = torch.tensor([0.01, -0.01]).repeat(5000)
    weights, _ = engine_correction(gaps, 2.0, torch.tensor([10_000]))
    assert weights[0] == pytest.approx(1.0, abs=1e-6)
    weights, _ = engine_correction(gaps.abs() * 4, 1e12, torch.tensor([10_000]))
    assert weights[0] == pytest.approx(math.exp(20.0), rel=1e-5)


def test_the_whole_loss_is_its_terms_with_their_weights() -> None:
    """Two trajectories share token 0, the second goes on with token 1, and the first holds one
    imitated token. All numbers are such that every term counts."""
    form = LossForm(
        surrogate=lambda *columns, owners, shaping, positions: clipped_surrogate(
            *columns, clip_low=0.2, clip_high=0.2, shaping=shaping
        ),
        engine_ratio_cap=1.5,
        engine_ratio="token",
        kl_coef=0.5,
        entropy_coef=0.25,
        graft_coef=0.1,
        graft_form="log",
    )
    column = partial(torch.tensor, dtype=torch.float64)
    logprobs = column([-1.0, -2.0]).requires_grad_()
    # The engine's probabilities are half the learner's, and so are the reference's.
    half = logprobs.detach() - math.log(2.0)
    batch = LossBatch(
        tokens=torch.tensor([0, 0, 1]),
        owners=torch.tensor([0, 1, 1]),
        advantages=column([1.0, -1.0, -1.0]),
        shaping=column([1.0, 1.0, 1.0]),
        positions=torch.tensor([3, 3, 4]),
        sampling_logprobs=half,
        factors=column([0.5, 0.25]),
        imitated=ImitatedBatch(
            tokens=torch.tensor([0]), owners=torch.tensor([0]), advantages=column([1.0])
        ),
    )
    scores = PassScores(
        logprobs=logprobs,
        entropies=column([0.4, 0.8]),
        old_logprobs=logprobs.detach(),
        imitated_logprobs=column([-2.0]),
        ref_logprobs=half,
    )
    terms = loss_terms(batch, scores, form)
    k3 = 0.5 + math.log(2.0) - 1.0
    assert terms["policy"].tolist() == pytest.approx([-1.5, 1.5, 1.5])
    assert terms["kl"].tolist() == pytest.approx([k3] * 3)
    assert terms["entropy"].tolist() == pytest.approx([0.4, 0.4, 0.8])
    assert terms["imitation"].tolist() == pytest.approx([0.2])
    assert terms["is_capped"].all() and not terms["is_clipped"].any()
    each = [sign * 1.5 + 0.5 * k3 - 0.25 * entropy for sign, entropy in ((-1, 0.4), (1, 0.4))]
    last = 1.5 + 0.5 * k3 - 0.25 * 0.8
    loss = total_loss(terms, batch, form)
    assert float(loss.detach()) == pytest.approx(
        0.5 * each[0] + 0.25 * (each[1] + last) + 0.5 * 0.2
    )
    loss.backward()
    # d k3 / d log π = 1 - 1/2. Token 0 pushes both ways.
    slope = 0.5 * 0.5
    wanted = [0.5 * (-1.5 + slope) + 0.25 * (1.5 + slope), 0.25 * (1.5 + slope)]
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx(wanted)
