"""The prefix tree of blocks: what a row finds stored is what its path says, and no block is lost or
given twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.policy.engine.blocks import (
    BlockPool,
    Node,
    PathCache,
    Row,
    cache_bytes,
    common_length,
)
from treegraft.policy.kernels.engine import BLOCK

KIB = 2 * BLOCK * (2 + 16) * 4
"""Bytes of a block of the model below: two heads of width 2, whose values take 16, in float32."""


def fake_model() -> Any:
    config = SimpleNamespace(
        num_key_value_heads=2, num_attention_heads=2, head_dim=2, hidden_size=4, num_hidden_layers=1
    )
    config.get_text_config = lambda: config
    return SimpleNamespace(config=config, dtype=torch.float32, device=torch.device("cpu"))


def make_cache(max_blocks: int = 1000, max_rows: int = 8) -> PathCache:
    return PathCache(BlockPool(fake_model(), max_blocks * KIB), max_rows)


def test_on_a_gpu_all_blocks_are_allocated_at_once() -> None:
    """Shapes only, on torch's device without memory."""
    model = fake_model()
    model.device = torch.device("meta")
    pool = BlockPool(model, 100.5 * KIB)
    cache = PathCache(pool, max_rows=8)
    assert pool.num_blocks == len(pool.keys[0]) == len(pool.values[0]) == 100
    before = pool.keys[0]
    row = cache.open(list(range(99 * BLOCK)), 99 * BLOCK)
    assert row is not None
    cache.extend(row, 99 * BLOCK)
    assert pool.keys[0] is before and len({node.block for node in row.nodes}) == 99


def test_the_room_of_a_gpu_is_what_learning_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"cuda": (50e9, 80e9)}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: free[device.type])
    cpu = torch.device("cpu")
    gpu = torch.device("cuda")
    assert cache_bytes("auto", cpu) == 4e9 and cache_bytes(0.5, cpu) == 5e8
    assert cache_bytes("auto", gpu, 30e9) == 20e9 and cache_bytes(50, gpu, 30e9) == 50e9
    for cache_gb, reserved in ((51, 0.0), ("auto", 50e9)):
        with raises_code("gpu-memory-short"):
            cache_bytes(cache_gb, gpu, reserved)  # type: ignore[arg-type]


def feed(cache: PathCache, row: Row, count: int) -> None:
    """Stores token ids where keys and values would go."""
    cache.extend(row, count)
    for position in range(row.fed, row.fed + count):
        block = cache.table[row.slot, position // BLOCK]
        cache.pool.keys[0][block, :, :, position % BLOCK] = row.token_ids[position]
        cache.pool.values[0][block, :, position % BLOCK] = row.token_ids[position]
    cache.fed(row, count)


def open_and_feed(cache: PathCache, path: list[int]) -> Row:
    row = cache.open(list(path), len(path))
    assert row is not None
    feed(cache, row, len(path) - row.fed)
    return row


def stored(cache: PathCache, row: Row) -> list[int]:
    blocks = cache.table[row.slot, : len(row.nodes)].long()
    keys = cache.pool.keys[0][blocks][:, 1, 1].reshape(-1)[: row.fed]
    values = cache.pool.values[0][blocks][:, 0, :, 1].reshape(-1)[: row.fed]
    assert torch.equal(keys, values)
    return [int(token) for token in keys]


def check(cache: PathCache) -> None:
    """Every block is free or belongs to one node, users are counted right, and every row holds its
    own path."""
    nodes: list[Node] = []
    waiting = [cache.root]
    while waiting:
        node = waiting.pop()
        for child in node.children:
            assert child.parent is node
            is_full = len(child.token_ids) == BLOCK
            assert is_full or not child.children, "only full blocks are gone on from"
            nodes.append(child)
            waiting.append(child)
    blocks = [node.block for node in nodes] + cache._free_blocks
    assert sorted(blocks) == list(range(cache.pool.num_blocks))
    for node in nodes:
        assert node.num_users == sum(node in row.nodes for row in cache.rows)
        assert (node in cache._idle) == (not node.num_users and not node.children)
    assert cache._num_unused == sum(not node.num_users for node in nodes)
    for row in cache.rows:
        assert stored(cache, row) == row.token_ids[: row.fed]
        assert [token for node in row.nodes for token in node.token_ids] == row.token_ids[: row.fed]


def test_a_worked_example() -> None:
    """150 tokens are 64 + 64 + 22; a path that parts at 100 shares one block and copies 36
    positions of the second."""
    cache = make_cache()
    path = list(range(150))
    first = open_and_feed(cache, path)
    assert [len(node.token_ids) for node in first.nodes] == [64, 64, 22]
    branch = cache.open([*path[:100], 7, 8, 9], 200)
    assert branch is not None and branch.fed == 100
    assert branch.nodes[0] is first.nodes[0] and branch.nodes[1] is not first.nodes[1]
    assert branch.nodes[1].token_ids == path[64:100] and branch.nodes[0].num_users == 2
    feed(cache, branch, 3)
    check(cache)
    cache.close(first)
    # The same path again: the last token is always fed, so 149 of its 150 are found; its tail has
    # one more and is copied.
    again = cache.open(list(path), 150)
    assert again is not None and again.fed == 149 and again.nodes[2] is not first.nodes[2]
    # A longer one takes the idle tail over.
    longer = cache.open([*path, 1, 2], 152)
    assert longer is not None and longer.fed == 150 and longer.nodes[2] is first.nodes[2]
    check(cache)


def test_room_is_promised_before_a_row_opens() -> None:
    """Four blocks: a row that may come to three leaves room for one of one, not of two; alone even
    five are let in."""
    cache = make_cache(max_blocks=4)
    long = cache.open([1, 2], 3 * BLOCK)
    assert long is not None
    assert cache.open([3, 4], 2 * BLOCK) is None
    short = cache.open([3, 4], BLOCK)
    assert short is not None
    cache.close(long)
    cache.close(short)
    alone = cache.open([5] * 300, 300)
    assert alone is not None
    feed(cache, alone, 300)
    check(cache)
    assert cache.pool.num_blocks == 5


def test_the_oldest_goes_first_and_its_parents_after_it() -> None:
    cache = make_cache(max_blocks=4)
    paths = [[n] * 100 for n in (1, 2)]
    for path in paths:
        cache.close(open_and_feed(cache, path))
    third = open_and_feed(cache, [3] * 100)
    assert (
        cache.num_evictions == 2 and cache.matched(paths[0]) == 0 and cache.matched(paths[1]) == 99
    )
    cache.close(third)
    check(cache)


def test_a_block_whose_last_child_goes_for_its_copy_can_go_too() -> None:
    """Two blocks of one path fill the cache; another path parts within the first, and its block
    takes the place of the second."""
    cache = make_cache(max_blocks=2)
    path = list(range(128))
    cache.close(open_and_feed(cache, path))
    row = open_and_feed(cache, [*path[:32], 7, 8])
    assert cache.num_evictions == 1 and cache.pool.num_blocks == 2
    check(cache)
    cache.close(row)
    check(cache)


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80))
def test_common_length(a: list[int], b: list[int]) -> None:
    expected = next(
        (n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
    assert common_length(a, b) == expected


ACTS = st.lists(
    st.tuples(
        st.sampled_from(["open", "open", "feed", "feed", "grow", "close", "clear"]),
        st.integers(0, 10**6),
    ),
    max_size=60,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(ACTS, st.integers(1, 14))
def test_any_traffic_leaves_the_blocks_in_order(
    acts: list[tuple[str, int]], max_blocks: int
) -> None:
    """Paths over two tokens with parts of 40 equal ones, so that they share blocks, part inside
    them, and meet again."""
    cache = make_cache(max_blocks, max_rows=4)
    seen: list[list[int]] = [[0]]

    for act, number in acts:
        row = cache.rows[number % len(cache.rows)] if cache.rows else None
        if act == "open":
            known = seen[number % len(seen)]
            path = [
                *known[: 1 + number // 7 % len(known)],
                *[number // 3 % 2] * (number // 11 % 90),
            ]
            seen.append(path)
            known = path[: min(BLOCK, len(path) - 1)]
            shared = (common_length(one.token_ids, known) for one in cache.root.children)
            assert min(cache.matched(path), BLOCK) == max(shared, default=0)
            cache.open(list(path), len(path) + number % 50)
        elif act == "feed" and row is not None and row.fed < len(row.token_ids):
            feed(cache, row, 1 + number % (len(row.token_ids) - row.fed))
        elif act == "grow" and row is not None and len(row.token_ids) < row.max_nodes * BLOCK:
            row.token_ids.append(number % 2)
            seen.append(list(row.token_ids))
        elif act == "close" and row is not None:
            cache.close(row)
        elif act == "clear" and not cache.rows:
            cache.clear()
            assert len(cache._free_blocks) == cache.pool.num_blocks
        check(cache)
