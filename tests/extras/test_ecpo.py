"""ECPO's credit by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tests.extras.test_axpo import finished

from treegraft import load_config
from treegraft.extras.methods.ecpo import action_advantages, action_of, evidence


def test_rare_actions_are_shrunk_and_noise_is_gated() -> None:
    """Action a: returns 1, 1, 1, 0 (mean 3/4); action b: one return of 0; mean 3/5. Between actions
    the variance is (4 · .15² + .6²) / 5 = .09, within them (3 · .25² + .75²) / 5 = .15."""
    instances = [((n, "s"), "a", value) for n, value in enumerate((1.0, 1.0, 1.0, 0.0))]
    instances.append(((4, "s"), "b", 0.0))
    found = action_advantages(instances, evidence=1.0, eps=0.0, divides=False)
    gate = 0.09 / 0.24
    assert found[0, "s"] == found[3, "s"] == pytest.approx(gate * 4 / 5 * 0.15)
    assert found[4, "s"] == pytest.approx(gate * 1 / 2 * -0.6)
    scaled = action_advantages(instances, evidence=1.0, eps=0.0)
    assert scaled[4, "s"] == pytest.approx(found[4, "s"] / 0.24**0.5)
    # Without shrinkage an action counts in full, however rare.
    assert action_advantages(instances, evidence=0.0, eps=0.0, divides=False)[
        4, "s"
    ] == pytest.approx(gate * -0.6)
    alone = action_advantages([((0, "s"), "a", 1.0), ((1, "s"), "a", 0.0)], evidence=1.0, eps=0.0)
    assert set(alone.values()) == {0.0}


def test_states_are_what_was_shown_last() -> None:
    """Three rollouts search "x" and see "x"; one answers at once. At the beginning the search has
    returns 1, 0, 0 and the answer 0; behind the result there is one action, which gets nothing."""
    tree = finished((1.0, 0.5, 0.1), (0.0, 0.5, 0.1), (0.0, 0.5, 0.1), (0.0, None, 0.1))
    credit = SimpleNamespace(discount=1.0, evidence=1.0, eps=1e-6, state_weight=2.0)
    members = tree.trajectories()
    found = evidence(members, credit=credit, scale="none")
    # Means 1/3 and 0, of all 1/4; between 1/48, within 1/6: their share 1/9.
    assert found[0, "0.0"] == found[2, "0.2"] == pytest.approx(2 / 9 * 3 / 4 * (1 / 3 - 1 / 4))
    assert found[3, "0.3"] == pytest.approx(2 / 9 * 1 / 2 * -1 / 4)
    assert {found[n, f"0.{n}.0"] for n in range(3)} == {0.0}
    assert action_of(members[0].steps[1]) == action_of(members[1].steps[1])


def test_its_settings_count_with_it_alone() -> None:
    config = load_config("demo", ["credit.attribution=evidence", "credit.evidence=2"])
    assert (config.credit.evidence, config.credit.discount) == (2, 0.95)
