"""The arithmetic of `benchmarks.simulate`, on numbers that can be done on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import costs, simulate
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(0.5, 100.0)


def test_the_first_row_is_the_update_of_eight_cards() -> None:
    way = next(
        one
        for one in costs.ways(costs.EIGHT_H100).values()
        if (one.layout, one.num_parts, one.scores_old, one.skips_flat) == ("packed", 4, True, True)
    )
    theirs = costs.phases(costs.Work(), costs.EIGHT_H100, way)
    ours = simulate.best_of(simulate.FIRST)[0]
    assert ours.rollout == pytest.approx(theirs["sampling"])
    assert ours.old == pytest.approx(theirs["old log-probabilities"])
    assert ours.learn == pytest.approx(theirs["forward and backward"])
    assert ours.update == pytest.approx(sum(theirs.values()), rel=0.01)


@given(rollout=SECONDS, rest=SECONDS, staleness=st.integers(0, 4))
def test_the_time_from_publish_to_publish_is_that_of_the_recursion(
    rollout: float, rest: float, staleness: int
) -> None:
    published = [0.0] * (staleness + 1)
    for _ in range(300):
        trees = published[-1 - staleness] + rollout
        published.append(max(published[-1], trees) + rest)
    # Over whole rounds of staleness + 1 updates, which may come in bursts.
    rounds = 40 * (staleness + 1)
    found = (published[-1] - published[-1 - rounds]) / rounds
    assert found == pytest.approx(simulate.period(rollout, rest, staleness), rel=1e-3)


def test_a_step_waits_for_its_trees_and_for_the_step_before_it() -> None:
    # 4 to 6, then 6 to 8 though its trees were there at 5, then 11 to 13.
    assert simulate.last_of([4.0, 5.0, 11.0], 2.0) == 13.0


def test_streamed_steps_do_not_pay_for_divided_cards() -> None:
    one = simulate.Cluster(num_gpus=64, num_tasks=1024)
    streamed = min(simulate.streamed_s(one, num) for num in simulate.divisions(one))
    found = simulate.phases(one, 24, 40)
    learning = found.old + found.learn + found.driver
    # It is in between: all trees first, or no wait for trees at all.
    assert learning < simulate.streamed_s(one, 24) < found.update
    assert streamed > simulate.best_of(one)[0].update


@pytest.mark.parametrize(
    ("page", "lines"),
    [("cluster-sizing", simulate.table()), ("overlap", simulate.streamed_table())],
    ids=["sizing", "overlap"],
)
def test_pages_show_the_tables(page: str, lines: Iterator[str]) -> None:
    text = (Path(__file__).parents[1] / "docs" / f"{page}.md").read_text(encoding="utf-8")
    missing = [line for line in lines if line[2].isdigit() and line not in text.splitlines()]
    assert not missing


def test_what_no_number_of_cards_makes_shorter() -> None:
    one = simulate.Cluster(num_gpus=64, num_tasks=128)
    few, many = (simulate.phases(one, num, num) for num in (64, 1024))
    # Sixteen trees a step in four parts keep 64 ranks busy, and no more.
    reduced = many.learn - few.learn
    assert reduced == pytest.approx(0.0, abs=0.1) and many.old == pytest.approx(few.old)
    # The path's own tokens read the weights once each, at any number of servers.
    assert many.rollout > 0.8 * few.rollout
    assert many.driver == pytest.approx(few.driver, rel=0.1)


def test_a_prediction_is_exact_where_the_model_holds() -> None:
    def update(sampled: float, unique: float, num_ranks: int) -> simulate.Update:
        # 1 s and 1 ms a sampled token; 2 steps of 0.5 s and 2 ms a unique token; 3 s of publish.
        learn = 2 * 0.5 * num_ranks + 0.002 * unique / num_ranks
        return simulate.Update(1 + 0.001 * sampled, learn, 3.0, sampled, unique, 2)

    small, large, wanted = update(100, 200, 1), update(300, 600, 1), update(1000, 2000, 2)
    found = simulate.predicted(wanted, small, large, update(100, 200, 2), 2)
    # 1 + 1 sampling, 2 + 2 learning, 3 publish.
    assert found == pytest.approx(9.0)
    assert wanted.rollout + wanted.learn + wanted.publish == pytest.approx(9.0)
