"""Losses by hand: values and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from treegraft.algo.losses import Denominators, clipped_surrogate, contribution_weights, k3_divergence


def surrogate(ratio: float, advantage: float, dual_clip: float | None = None) -> tuple[float, float, bool]:
    """Loss, its derivative after the new log-probability, and whether it was clipped, at clip 0.2 low and 0.3 high."""
    new = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    terms = clipped_surrogate(
        new, old, torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.3, dual_clip=dual_clip
    )
    terms.losses.sum().backward()
    assert new.grad is not None
    return float(terms.losses.detach()), float(new.grad), bool(terms.is_clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        # l = -ρA inside the trust region; dl/dlogπ = -ρA.
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.0, -2.0, 2.0, 2.0, False),
        # Above it with A > 0: held at 1.3, no gradient. Below it with A > 0: min takes the unclipped side.
        (1.5, 2.0, -2.6, 0.0, True),
        (0.5, 2.0, -1.0, -1.0, False),
        # With A < 0 the other way round: held at 0.8 from below, unbounded above.
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
        # Ends differ: 1.25 lies above 1.2 but below 1.3.
        (1.25, 1.0, -1.25, -1.25, False),
        (1.4, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool) -> None:
    assert surrogate(ratio, advantage) == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "is_clipped"),
    [
        (5.0, -2.0, 6.0, 0.0, True),  # c = 3: at most 3 |A|
        (2.9, -2.0, 5.8, 5.8, False),
        (0.5, -2.0, 1.6, 0.0, True),  # the ordinary clip acts first
        (5.0, 2.0, -2.6, 0.0, True),  # for A > 0 there is no dual clip
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, is_clipped: bool) -> None:
    assert surrogate(ratio, advantage, dual_clip=3.0) == (pytest.approx(loss), pytest.approx(gradient), is_clipped)


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
        (-5.0, 10.0, 0.0),  # e^5 - 6 = 142: held at 10
    ],
)
def test_k3(difference: float, value: float, gradient: float) -> None:
    new = torch.tensor([difference - 1.0], dtype=torch.float64, requires_grad=True)
    divergence = k3_divergence(new, torch.tensor([-1.0], dtype=torch.float64))
    divergence.sum().backward()
    assert new.grad is not None
    assert (float(divergence.detach()), float(new.grad)) == (pytest.approx(value), pytest.approx(gradient))


def test_aggregations_by_hand() -> None:
    """Two groups: w = (1/2, 1/2) with |y| = (4, 2), and w = (1) with |y| = 3; Σ w|y| = 2 + 1 + 3 = 6."""
    weights, lengths = torch.tensor([0.5, 0.5, 1.0]), torch.tensor([4.0, 2.0, 3.0])
    denominators = Denominators(num_groups=2, weighted_tokens=6.0, length_constant=10.0)

    def factors(aggregation: str) -> list[float]:
        return contribution_weights(weights, lengths, denominators, aggregation).tolist()  # type: ignore[arg-type]

    assert factors("token-mean") == pytest.approx([1 / 12, 1 / 12, 1 / 6])
    assert factors("sequence-mean") == pytest.approx([1 / 16, 1 / 8, 1 / 6])
    assert factors("sequence-sum") == pytest.approx([1 / 40, 1 / 40, 1 / 20])
    with pytest.raises(ValueError, match="aggregation is 'mean'"):
        factors("mean")


def test_uniform_weights_give_the_published_means() -> None:
    """w = 1/n in every group: token-mean is DAPO's plain mean over all tokens when all groups have one size."""
    lengths = torch.tensor([3.0, 1.0, 2.0, 2.0])
    weights = torch.full((4,), 0.5)
    denominators = Denominators(num_groups=2, weighted_tokens=float((weights * lengths).sum()), length_constant=1.0)
    factors = contribution_weights(weights, lengths, denominators, "token-mean")
    assert factors.tolist() == pytest.approx([1 / 8] * 4)
    # GRPO, eq. 3: 1/G Σ_i 1/|y_i| Σ_t, averaged over groups.
    sequence = contribution_weights(weights, lengths, denominators, "sequence-mean")
    assert sequence.tolist() == pytest.approx([1 / (2 * 2 * n) for n in (3, 1, 2, 2)])


def test_a_path_without_loss_tokens_weighs_nothing() -> None:
    denominators = Denominators(num_groups=1, weighted_tokens=0.0, length_constant=4.0)
    for aggregation in ("token-mean", "sequence-mean", "sequence-sum"):
        factors = contribution_weights(torch.tensor([1.0]), torch.tensor([0.0]), denominators, aggregation)  # type: ignore[arg-type]
        assert factors.tolist() == [0.0]
