"""benchmarks/costs.py: tokens, seconds and the busiest rank by hand; the parts of a tree are those
that the learner makes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.costs import (
    EIGHT_H100,
    Machine,
    Way,
    Work,
    busiest,
    example_steps,
    expected_busiest,
    phases,
    python_seconds,
    sampling_s,
    table,
    tree_flops,
)
from tests.support.trees import Part, build_tree

from treegraft.extras.lab.roofline import Card, forward_flops
from treegraft.policy.learn.pack import num_tree_tokens
from treegraft.policy.learn.plan import plan_passes
from treegraft.policy.shapes import ModelShape

WORK = Work(
    num_tasks=4,
    num_leaves=4,
    num_starts=2,
    num_optimiser_steps=2,
    prompt=10,
    mean=20,
    longest=30,
    sampled_frac=0.5,
    branch_frac=0.5,
    flat_frac=0.5,
    tools_s=1.0,
)
SHAPE = ModelShape(
    num_weights=1000, num_layers=2, num_kv_heads=1, head_dim=2, hidden_size=4, vocab_size=50
)
MACHINE = Machine(
    shape=SHAPE,
    card=Card(name="toy", flops=1e6, bandwidth=1e3, memory=1e6),
    num_gpus=2,
    decode_share=0.5,
    forward_share=0.5,
    learn_share=0.25,
)


def test_tokens_by_hand() -> None:
    # Ten of the prompt, two starts of 20, two branches of 10.
    assert WORK.num_tokens("packed") == 4 * 70
    assert WORK.num_tokens("rows") == 4 * 4 * 30
    assert WORK.num_tokens("padded") == 4 * 4 * 40
    assert WORK.num_sampled == 0.5 * 4 * 60


def test_sampling_by_hand() -> None:
    # 600 weights in layers and a head of 200, two bytes each; keys and values of 16 bytes a token.
    # Four tasks on two GPUs: 4 rows each while the starts write alone, then 8; they hold 10 + 5 and
    # 10 + 15 tokens on average. 7.5 of 15 steps each, at 500 bytes a second.
    first, second = 1600 + 4 * 15 * 16, 1600 + 8 * 25 * 16
    assert sampling_s(WORK, MACHINE) == pytest.approx(1.0 + 7.5 * (first + second) / 500)


def test_the_busiest_rank_by_hand() -> None:
    assert busiest(16, 1, 8) == 2 and busiest(10, 1, 8) == 2 and busiest(10, 4, 8) == 5 / 4
    # Two trees a step, none, one or two of which are learned from in 1, 2 and 1 of 4 cases.
    skipping = Way(layout="packed", skips_flat=True)
    assert expected_busiest(WORK, skipping, 2) == 0.75
    assert expected_busiest(WORK, replace(skipping, num_parts=2), 2) == (2 * 0.5 + 1) / 4
    assert expected_busiest(WORK, Way(layout="packed"), 2) == 1
    assert expected_busiest(WORK, Way(layout="rows", skips_flat=True), 2) == 0.5


def test_phases_by_hand() -> None:
    rows = phases(WORK, MACHINE, Way(layout="rows", publish_s=3.0, driver_s=0.1))
    # A rank has a tree of four rows of 30 tokens, each of which sees 15 on average.
    forward = 4 * 30 * forward_flops(SHAPE, 15, 0.5) / 1e6
    assert rows["old log-probabilities"] == pytest.approx(forward / 0.5)
    assert rows["forward and backward"] == pytest.approx(2 * 3 * forward / 0.25)
    assert (rows["publish"], rows["driver"]) == (3.0, pytest.approx(28.0))
    packed = 10 * forward_flops(SHAPE, 5, 0.5)
    packed += 40 * forward_flops(SHAPE, 20, 0.5) + 20 * forward_flops(SHAPE, 25, 0.5)
    assert tree_flops(WORK, SHAPE, Way(layout="packed")) == pytest.approx(packed)
    assert not phases(WORK, MACHINE, Way(layout="rows", scores_old=False))["old log-probabilities"]


def test_parts_are_those_of_the_learner() -> None:
    branched = Part("s" * 10, (Part("s" * 10), Part("s" * 10)))
    tree = build_tree(Part("p" * 10, (branched, branched)))
    whole = plan_passes([tree], [0], 100, 1)
    halves = plan_passes([tree], [0], 40, 1)
    for plan, num_parts in ((whole, 1), (halves, 2)):
        sizes = [num_tree_tokens(part.tree) for pack in plan.packs for part in pack]
        assert sizes == [10 + 60 // num_parts] * num_parts
        # With no attention and no head, operations count tokens.
        flat = replace(SHAPE, num_layers=0, vocab_size=0)
        way = Way(layout="packed", num_parts=num_parts)
        assert tree_flops(WORK, flat, way) == sum(sizes) * 2 * flat.num_layer_weights


def test_eight_cards_are_those_of_the_estimate() -> None:
    """By an independent estimate of the same update: 5.3, 8.2 and 9.6 M tokens, 3.1 M sampled; 19
    and 29 s of old log-probabilities, 79 and 122 s of learning, 50 to 65 s of sampling."""
    work = Work()
    sizes = [work.num_tokens(layout) / 1e6 for layout in ("packed", "rows", "padded")]
    assert [*sizes, work.num_sampled / 1e6] == pytest.approx([5.3, 8.2, 9.6, 3.1], rel=0.02)
    packed, rows = (phases(work, EIGHT_H100, Way(layout=one)) for one in ("packed", "rows"))
    learning = [found["forward and backward"] for found in (packed, rows)]
    assert learning == pytest.approx([79, 122], rel=0.03)
    scoring = [found["old log-probabilities"] for found in (packed, rows)]
    assert scoring == pytest.approx([19, 29], rel=0.12)
    assert 50 < packed["sampling"] < 65
    lines = [*table(work, EIGHT_H100)]
    assert len(lines) == 12 and lines[2].endswith("| 1.00 |")


def test_the_tree_that_python_is_timed_on_is_that_of_the_arithmetic() -> None:
    work = replace(WORK, num_tasks=1, num_leaves=4)
    steps = example_steps(work)
    assert sum(len(step["token_ids"]) for step in steps) == work.num_tokens("packed") == 70
    assert [step["id"] for step in steps] == ["0", "0.0", "0.0.0", "0.0.1", "0.1", "0.1.0", "0.1.1"]
    assert all(seconds > 0 for seconds in python_seconds(work).values())
