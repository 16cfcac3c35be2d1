"""Objectives beside PPO's clip, by hand: values, gradients, and GSPO against its sequence form."""

from __future__ import annotations

import math

import pytest
import torch

from treegraft.algo.objectives import (
    capped_surrogate,
    kept_gradient_surrogate,
    sequence_surrogate,
)


def at_ratio(ratio: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A new log-probability of log(ratio / 2) and an old one of log(1 / 2)."""
    new = torch.tensor([math.log(ratio / 2)], dtype=torch.float64, requires_grad=True)
    return new, torch.tensor([math.log(0.5)], dtype=torch.float64)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "is_capped"),
    [
        # The gradient after log π is -w A, w = clip(ρ, .8, 1.3).
        (1.0, 2.0, 1.0, False),
        (1.5, 2.0, 1.3, True),
        (1.5, -2.0, 1.3, True),  # PPO leaves this one at 1.5
        (0.5, 2.0, 0.8, True),
        (0.5, -2.0, 0.8, True),  # and takes this one's gradient away
    ],
)
def test_cispo_keeps_every_token(
    ratio: float, advantage: float, weight: float, is_capped: bool
) -> None:
    new, old = at_ratio(ratio)
    terms = capped_surrogate(
        new, old, torch.tensor([advantage], dtype=torch.float64), clip_low=0.2, clip_high=0.3
    )
    terms.losses.sum().backward()
    assert float(terms.losses.detach()) == pytest.approx(-weight * advantage * math.log(ratio / 2))
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(-weight * advantage)
    assert bool(terms.is_clipped) is is_capped


@pytest.mark.parametrize(
    ("ratio", "advantage", "kept", "loss", "gradient"),
    [
        # Inside, and on the sides that PPO leaves alone, nothing changes.
        (1.1, 2.0, (1.0, 1.0), -2.2, -2.2),
        (1.5, -2.0, (1.0, 1.0), 3.0, 3.0),
        (0.5, 2.0, (1.0, 1.0), -1.0, -1.0),
        # Above with A > 0: the value is held at 1.3, the gradient is that of a ratio of 1.3.
        (1.5, 2.0, (1.0, 1.0), -2.6, -2.6),
        # Below with A < 0: .8 times β₁ = .25.
        (0.5, -2.0, (0.25, 1.0), 1.6, 0.4),
        # AEPO: a hard clip below, kept above.
        (0.5, -2.0, (0.0, 1.0), 1.6, 0.0),
        (1.5, 2.0, (0.0, 1.0), -2.6, -2.6),
    ],
)
def test_gradients_kept_past_the_clip(
    ratio: float, advantage: float, kept: tuple[float, float], loss: float, gradient: float
) -> None:
    new, old = at_ratio(ratio)
    terms = kept_gradient_surrogate(
        new,
        old,
        torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
        kept_low=kept[0],
        kept_high=kept[1],
    )
    terms.losses.sum().backward()
    assert float(terms.losses.detach()) == pytest.approx(loss)
    assert new.grad is not None
    assert float(new.grad) == pytest.approx(gradient)


def test_gspo_by_hand() -> None:
    # Sequence 0 has log-ratios .2 and .0, so s = e^.1; sequence 1 has one of -.3, so s = e^-.3.
    new = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.2, -2.0, -0.2], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64)
    owners = torch.tensor([0, 0, 1])
    terms = sequence_surrogate(new, old, advantages, owners, clip_low=0.5, clip_high=0.5)
    first = math.exp(0.1)
    second = math.exp(-0.3)
    assert terms.losses.tolist() == pytest.approx([-first, -first, 2 * second])
    assert terms.ratios.tolist() == pytest.approx([first, first, second])
    terms.losses.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-first, -first, 2 * second])
    # e^.1 = 1.105 lies above 1.05, for both tokens at once although the second did not move.
    clipped = sequence_surrogate(new, old, advantages, owners, clip_low=0.05, clip_high=0.05)
    assert clipped.is_clipped.tolist() == [True, True, True]
    assert clipped.losses.tolist() == pytest.approx([-1.05, -1.05, 2 * 0.95])


def test_token_form_of_gspo_has_the_gradient_of_the_sequence_form() -> None:
    generator = torch.Generator().manual_seed(5)
    owners = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
    new = -torch.rand(9, generator=generator, dtype=torch.float64)
    old = new + 0.1 * torch.randn(9, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([1.0, -1.0, 0.5], dtype=torch.float64)
    lengths = torch.bincount(owners)
    logprobs = new.clone().requires_grad_()
    terms = sequence_surrogate(
        logprobs, old, rewards[owners], owners, clip_low=0.02, clip_high=0.03
    )
    (terms.losses / lengths[owners]).sum().backward()
    # The paper's eq. 5, one ratio for each sequence, differentiated through the mean.
    whole = new.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for index in range(3):
        ratio = (whole - old)[owners == index].mean().exp()
        total -= torch.minimum(ratio * rewards[index], ratio.clamp(0.98, 1.03) * rewards[index])
    total.backward()
    assert logprobs.grad is not None and whole.grad is not None
    torch.testing.assert_close(logprobs.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_shaping_moves_a_grafted_trajectory_in_every_objective() -> None:
    new, old = at_ratio(1.25)
    advantage = torch.ones(1, dtype=torch.float64)
    shaping = torch.full((1,), 1.1).double()
    # 1.1 · 1.25 = 1.375 lies past 1.3, where 1.25 does not.
    limits = {"clip_low": 0.2, "clip_high": 0.3}
    for terms in (
        capped_surrogate(new, old, advantage, shaping=shaping, **limits),
        kept_gradient_surrogate(new, old, advantage, shaping=shaping, **limits),
        sequence_surrogate(new, old, advantage, torch.zeros(1).long(), shaping=shaping, **limits),
    ):
        assert terms.is_clipped.tolist() == [True]
        assert terms.ratios.tolist() == pytest.approx([1.25])
