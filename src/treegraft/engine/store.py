"""Keys and values: a shared part per prompt, and a row of its own per path.

    prompt of a tree   p p p p p          kept once, read by every row of the tree
    row 0                       s s t t s
    row 1                       s s t t s s      a branch: row 0's first entries copied, not computed again

Both parts are preallocated per layer as [slots, kv heads, positions, width] and grow by whole blocks of 64 positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

BLOCK = 64
MIN_SHARED = 32
"""Leading tokens of two prompts from which copying pays."""
NUM_SOURCES = 8
"""Filled prompts that a new one is compared with."""


def round_up(value: int, unit: int = BLOCK) -> int:
    """Returns the smallest multiple of `unit` that is at least `value`."""
    return -(-value // unit) * unit


class KeyValueStore:
    """Preallocated keys and values of all layers, in `slots` slots of growing length."""

    def __init__(self, num_layers: int, num_slots: int, num_heads: int, width: int, like: torch.Tensor) -> None:
        self._shape = (num_slots, num_heads, width)
        self._like = like
        self.capacity = 0
        self.keys: list[torch.Tensor] = [like.new_empty(num_slots, num_heads, 0, width)] * num_layers
        self.values: list[torch.Tensor] = list(self.keys)

    @classmethod
    def for_model(cls, model: Any, num_slots: int) -> KeyValueStore:
        """Returns a store of the shape that the model's layers ask for."""
        config = model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        return cls(config.num_hidden_layers, num_slots, heads, width, like)

    def reserve(self, positions: int) -> None:
        """Makes room for `positions` positions in every slot; what is stored stays."""
        if positions <= self.capacity:
            return
        capacity = max(round_up(positions), min(2 * self.capacity, self.capacity + 1024))
        for column in (self.keys, self.values):
            for layer, old in enumerate(column):
                slots, heads, width = self._shape
                new = self._like.new_zeros(slots, heads, capacity, width)
                new[:, :, : self.capacity] = old
                column[layer] = new
        self.capacity = capacity

    def copy(self, source: int, target: int, positions: int) -> None:
        """Copies the first positions of one slot to another."""
        for column in (*self.keys, *self.values):
            column[target, :, :positions] = column[source, :, :positions]


@dataclass(eq=False)
class Prompt:
    """The shared part of a tree's paths."""

    slot: int
    token_ids: tuple[int, ...]
    fed: int = 0
    """Leading tokens whose keys and values are stored."""
    users: int = 0
    """Requests under way below it."""
    is_forgotten: bool = False
    """Nobody will ask below it again."""
    last_used: int = 0
    rows: list[Row] = field(default_factory=list)
    """Rows below it, idle ones included."""

    @property
    def is_ready(self) -> bool:
        return self.fed == len(self.token_ids)


@dataclass(eq=False)
class Row:
    """A path's own part, in use by a request or idle and waiting to be continued or copied."""

    slot: int
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)
    """Tokens after the shared part, as far as they are known."""
    fed: int = 0
    """Leading tokens whose keys and values are stored."""
    is_busy: bool = False
    last_used: int = 0


def common_length(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Returns how many leading entries agree, at most `limit`."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    for index in range(limit):
        if a[index] != b[index]:
            return index
    return limit


class PathCache:
    """Which slots hold which paths: finds the longest stored prefix, copies it for a branch, makes room by age."""

    def __init__(self, prompts: KeyValueStore, rows: KeyValueStore, num_prompts: int, num_rows: int) -> None:
        self.prompt_store = prompts
        self.row_store = rows
        self._free_prompts = list(range(num_prompts))[::-1]
        self._free_rows = list(range(num_rows))[::-1]
        self._prompts: dict[tuple[int, ...], Prompt] = {}
        self._clock = 0
        self.num_evictions = 0
        """Paths dropped while somebody might still have continued them; each costs a prefill if they do."""

    def all_prompts(self) -> list[Prompt]:
        """Returns every prompt that is kept."""
        return list(self._prompts.values())

    def clear(self) -> None:
        """Drops everything; nothing may be under way."""
        for prompt in list(self._prompts.values()):
            self._drop_prompt(prompt)

    def open(self, prompt_ids: tuple[int, ...], own_ids: list[int]) -> Row | None:
        """Returns a busy row for the path, with what is stored of it already in place; None when there is no room yet."""
        self._clock += 1
        prompt = self._prompts.get(prompt_ids) or self._new_prompt(prompt_ids)
        if prompt is None:
            return None
        best, matched = self._best_row(prompt, own_ids)
        if best is not None and not best.is_busy and best.fed == matched:
            row = best
        else:
            fresh = self._new_row(prompt, keep=best)
            if fresh is not None:
                row = fresh
                if best is not None and matched:
                    self.row_store.copy(best.slot, row.slot, matched)
            elif best is not None and not best.is_busy:
                row = best  # the only row to be had: its rest is given up for the path that continues it elsewhere
                self.num_evictions += 1
            else:
                return None
        row.token_ids, row.fed, row.is_busy = list(own_ids), matched, True
        row.last_used = prompt.last_used = self._clock
        prompt.users += 1
        prompt.is_forgotten = False
        return row

    def close(self, row: Row) -> None:
        """Marks a row idle; its keys and values stay until they are needed elsewhere."""
        row.is_busy = False
        row.prompt.users -= 1
        if row.prompt.is_forgotten and not row.prompt.users:
            self._drop_prompt(row.prompt)

    def forget(self, path_ids: tuple[int, ...]) -> None:
        """Drops the prompts that begin with `path_ids` once nothing is under way below them."""
        for key, prompt in list(self._prompts.items()):
            if key[: len(path_ids)] == path_ids or path_ids[: len(key)] == key:
                prompt.is_forgotten = True
                if not prompt.users:
                    self._drop_prompt(prompt)

    def prompts_to_fill(self, wanted: Iterable[Prompt]) -> list[Prompt]:
        """Returns the unfilled prompts among `wanted` whose turn it is, with what other prompts share already copied into them.

        Prompts mostly begin with one system prompt: the first is filled, the others wait for it and copy.
        """
        unfilled = [prompt for prompt in dict.fromkeys(wanted) if not prompt.is_ready]
        filled = [prompt for prompt in self._prompts.values() if prompt.is_ready][:NUM_SOURCES]
        turn: list[Prompt] = []
        for prompt in unfilled:
            if prompt.fed == 0:
                shared = [common_length(other.token_ids, prompt.token_ids, len(prompt.token_ids)) for other in filled]
                best = max(shared, default=0)
                if any(
                    common_length(other.token_ids, prompt.token_ids, best + MIN_SHARED) == best + MIN_SHARED for other in turn[:1]
                ):
                    continue
                if best >= MIN_SHARED:
                    self.prompt_store.copy(filled[shared.index(best)].slot, prompt.slot, best)
                    prompt.fed = best
            if not prompt.is_ready:
                turn.append(prompt)
        return turn

    def _best_row(self, prompt: Prompt, own_ids: list[int]) -> tuple[Row | None, int]:
        """The last own token is always fed again: its output is what the next token is sampled from."""
        best, matched, limit = None, 0, len(own_ids) - 1
        for row in prompt.rows:
            length = common_length(row.token_ids, own_ids, min(row.fed, limit))
            if length > matched or (length == matched and length and not row.is_busy and row.fed == length):
                best, matched = row, length
        return best, matched

    def _new_prompt(self, prompt_ids: tuple[int, ...]) -> Prompt | None:
        if not self._free_prompts:
            idle = [prompt for prompt in self._prompts.values() if not prompt.users]
            if not idle:
                return None
            self._drop_prompt(min(idle, key=lambda prompt: prompt.last_used))
            self.num_evictions += 1
        self.prompt_store.reserve(len(prompt_ids))
        prompt = Prompt(slot=self._free_prompts.pop(), token_ids=prompt_ids, last_used=self._clock)
        self._prompts[prompt_ids] = prompt
        return prompt

    def _drop_prompt(self, prompt: Prompt) -> None:
        del self._prompts[prompt.token_ids]
        self._free_prompts.append(prompt.slot)
        self._free_prompts.sort(reverse=True)
        self._free_rows.extend(row.slot for row in prompt.rows)
        self._free_rows.sort(reverse=True)
        prompt.rows.clear()

    def _new_row(self, prompt: Prompt, keep: Row | None) -> Row | None:
        if not self._free_rows:
            idle = [row for other in self._prompts.values() for row in other.rows if not row.is_busy and row is not keep]
            if not idle:
                return None
            oldest = min(idle, key=lambda row: row.last_used)
            oldest.prompt.rows.remove(oldest)
            self._free_rows.append(oldest.slot)
            self.num_evictions += 1
        row = Row(slot=self._free_rows.pop(), prompt=prompt)
        prompt.rows.append(row)
        return row
