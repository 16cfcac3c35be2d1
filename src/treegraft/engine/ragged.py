"""Attention of one forward pass over ragged rows: some decode one token, some take in many, some fill a shared prompt.

A row's numbers depend on its own path only. Scores over the prompt and over the row's own part are computed apart and merged,

    o = Σ_k exp(m_k - m) u_k / Σ_k exp(m_k - m) z_k,   m = max_k m_k      (m_k maximum, z_k sum, u_k weighted values of part k)

so the split lies at the prompt's end whatever else is in the batch, and every reduction runs over a multiple of 64 positions of
which the invisible ones are exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from treegraft.attention import AttentionOptions, Partial, merge_partials, partial_attention, tree_attention
from treegraft.engine.store import KeyValueStore, Prompt, Row, round_up
from treegraft.errors import ModelError
from treegraft.models import decoder

MIN_ROWS = 16
"""Float32 matrix products round differently below about a dozen rows."""
BUCKETS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Numbers of rows that a forward pass may have."""


@dataclass(eq=False)
class Segment:
    """Tokens of one row or prompt that this pass takes in: `count` tokens from `fed` on, at rows `offset`.. of the batch."""

    store: KeyValueStore
    slot: int
    fed: int
    count: int
    offset: int
    base: int
    """Position of the first token of the slot on its path."""
    row: Row | None = None
    """None when a prompt itself is filled."""


@dataclass(eq=False)
class RaggedPlan:
    """The plan of one forward pass over `num_tokens` batch rows (padding included)."""

    num_tokens: int
    prompts: KeyValueStore
    rows: KeyValueStore
    segments: list[Segment]
    _decode: list[Segment] = field(init=False)
    _long: list[Segment] = field(init=False)
    _masks: dict[tuple[str, int | None], torch.Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._decode = [s for s in self.segments if s.count == 1 and s.row is not None]
        self._long = [s for s in self.segments if s.count > 1 or s.row is None]
        if self._decode:
            self._index_decode(self.rows.keys[0].device)

    def _index_decode(self, device: torch.device) -> None:
        """Index tensors that lay decode rows out once per row slot and once per prompt slot."""
        decode = self._decode

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, device=device)

        self._batch_rows = tensor([s.offset for s in decode])
        self._slots = tensor([s.slot for s in decode])
        self._positions = tensor([s.fed for s in decode])
        self._num_slots = max(s.slot for s in decode) + 1
        # Slots are handed out from the lowest, so a slice with some idle slots in it mostly beats a gathering copy.
        self._takes_slice = self._num_slots <= 2 * len(decode)
        self._own_length = round_up(max(s.fed for s in decode) + 1)
        places = self._slots if self._takes_slice else torch.arange(len(decode), device=device)
        self._own_places = places
        self._own_count = self._num_slots if self._takes_slice else len(decode)
        by_prompt: dict[int, list[int]] = {}
        for index, segment in enumerate(decode):
            assert segment.row is not None
            by_prompt.setdefault(segment.row.prompt.slot, []).append(index)
        self._share = max(len(members) for members in by_prompt.values())
        lengths = {s.row.prompt.slot: len(s.row.prompt.token_ids) for s in decode if s.row is not None}
        last = max(by_prompt) + 1
        slots = list(range(last)) if last <= 2 * len(by_prompt) else list(by_prompt)
        self._prompt_slots = slice(0, last) if len(slots) == last else tensor(slots)
        self._num_prompts = len(slots)
        place = [0] * len(decode)
        for group, slot in enumerate(slots):
            for rank, index in enumerate(by_prompt.get(slot, ())):
                place[index] = group * self._share + rank
        self._shared_places = tensor(place)
        self._prompt_lengths = tensor([lengths.get(slot, 0) for slot in slots])
        self._row_positions = tensor([s.base + s.fed for s in decode])
        self._prompt_length = round_up(max(lengths.values()))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Returns [num_tokens, heads, width]; stores the keys and values of the tokens taken in."""
        heads, _, width = query.shape
        output = query.new_zeros(self.num_tokens, heads, width)
        if self._decode:
            output[self._batch_rows] = self._attend_decode(layer, query, key, value, options).to(output.dtype)
        for segment in self._long:
            rows = slice(segment.offset, segment.offset + segment.count)
            output[rows] = self._attend_long(layer, segment, query[:, rows], key[:, rows], value[:, rows], options).to(output.dtype)
        return output

    def _attend_decode(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        heads, _, width = query.shape
        keys, values = self.rows.keys[layer], self.rows.values[layer]
        keys[self._slots, :, self._positions] = key[:, self._batch_rows].transpose(0, 1)
        values[self._slots, :, self._positions] = value[:, self._batch_rows].transpose(0, 1)
        kv_heads = keys.shape[1]
        group = heads // kv_heads
        rows = query[:, self._batch_rows].transpose(0, 1).reshape(-1, kv_heads, group, width)
        own = self._own_part(layer, rows, options)
        parts = [own]
        if self._prompt_length:
            parts.append(self._prompt_part(layer, rows, options))
        sinks = None if options.sinks is None else options.sinks.float().view(1, kv_heads, group, 1)
        return merge_partials(parts, sinks).reshape(-1, heads, width)

    def _own_part(self, layer: int, rows: torch.Tensor, options: AttentionOptions) -> Partial:
        length = self._own_length
        if self._takes_slice:
            keys = self.rows.keys[layer][: self._num_slots, :, :length]
            values = self.rows.values[layer][: self._num_slots, :, :length]
        else:
            keys = self.rows.keys[layer][self._slots, :, :length]
            values = self.rows.values[layer][self._slots, :, :length]
        laid_out = rows.new_zeros(self._own_count, *rows.shape[1:])
        laid_out[self._own_places] = rows
        visible = self._mask("own", options.window, 1)
        peak, total, weighted = partial_attention(laid_out, keys, values, visible, options)
        places = self._own_places
        return peak[places], total[places], weighted[places]

    def _prompt_part(self, layer: int, rows: torch.Tensor, options: AttentionOptions) -> Partial:
        keys = self.prompts.keys[layer][self._prompt_slots, :, : self._prompt_length]
        values = self.prompts.values[layer][self._prompt_slots, :, : self._prompt_length]
        _, kv_heads, group, width = rows.shape
        count = self._num_prompts
        laid_out = rows.new_zeros(count * self._share, kv_heads, group, width)
        laid_out[self._shared_places] = rows
        # [prompts, kv heads, rows of the prompt x group, width]: all rows of a tree read their prompt's keys in one product.
        stacked = laid_out.view(count, self._share, kv_heads, group, width).transpose(1, 2).reshape(count, kv_heads, -1, width)
        parts = partial_attention(stacked, keys, values, self._mask("prompt", options.window, group), options)
        places = self._shared_places
        return tuple(  # type: ignore[return-value]
            part.view(count, kv_heads, self._share, group, -1).transpose(1, 2).reshape(-1, kv_heads, group, part.shape[-1])[places]
            for part in parts
        )

    def _mask(self, part: str, window: int | None, group: int) -> torch.Tensor:
        """The layers of a model share few kinds of masks; each is made once per pass."""
        if (part, window) not in self._masks:
            self._masks[part, window] = self._own_mask(window) if part == "own" else self._prompt_mask(window, group)
        return self._masks[part, window]

    def _own_mask(self, window: int | None) -> torch.Tensor:
        """[slots, 1, 1, positions] what a decode row sees of its own part."""
        device = self._slots.device
        positions = torch.arange(self._own_length, device=device)
        visible = torch.zeros(self._own_count, self._own_length, dtype=torch.bool, device=device)
        rows = positions[None] <= self._positions[:, None]
        if window is not None:
            rows &= self._positions[:, None] - positions[None] < window
        visible[self._own_places] = rows
        return visible[:, None, None]

    def _prompt_mask(self, window: int | None, group: int) -> torch.Tensor:
        """[prompts, 1, rows of the prompt x group or 1, positions] what decode rows see of their prompt."""
        positions = torch.arange(self._prompt_length, device=self._slots.device)
        inside = positions[None] < self._prompt_lengths[:, None]
        if window is None:
            return inside[:, None, None]
        count = self._num_prompts
        at = torch.zeros(count * self._share, dtype=torch.long, device=self._slots.device)
        at[self._shared_places] = self._row_positions
        near = at.view(count, self._share, 1) - positions < window
        return (inside[:, None] & near).repeat_interleave(group, dim=1)[:, None]

    def _attend_long(
        self,
        layer: int,
        segment: Segment,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attention of many tokens of one path; the query heads of a kv head are stacked, so nothing is repeated."""
        keys, values = segment.store.keys[layer][segment.slot], segment.store.values[layer][segment.slot]
        end = segment.fed + segment.count
        keys[:, segment.fed : end], values[:, segment.fed : end] = key, value
        heads, count, width = query.shape
        kv_heads = keys.shape[0]
        stacked = query.reshape(kv_heads, -1, width)
        at = torch.arange(segment.fed, end, device=query.device)
        length = round_up(end)
        visible = _window(at, torch.arange(length, device=query.device), options.window)
        tiled = visible.repeat(heads // kv_heads, 1)
        parts = [partial_attention(stacked, keys[:, :length], values[:, :length], tiled, options)]
        if segment.row is not None and segment.row.prompt.token_ids:
            prompt = segment.row.prompt
            length = round_up(len(prompt.token_ids))
            positions = torch.arange(length, device=query.device)
            visible = _window(at + segment.base, positions, options.window) & (positions < len(prompt.token_ids))
            prompt_keys, prompt_values = (
                column[layer][prompt.slot][:, :length] for column in (self.prompts.keys, self.prompts.values)
            )
            tiled = visible.repeat(heads // kv_heads, 1)
            parts.append(partial_attention(stacked, prompt_keys, prompt_values, tiled, options))
        sinks = None
        if options.sinks is not None:
            sinks = options.sinks.float().view(kv_heads, -1, 1).repeat_interleave(count, dim=1)
        return merge_partials(parts, sinks).reshape(heads, count, width).transpose(0, 1)


def _window(rows: torch.Tensor, columns: torch.Tensor, window: int | None) -> torch.Tensor:
    """[rows, columns] causal visibility of positions, inside a sliding window where there is one."""
    visible = columns[None] <= rows[:, None]
    if window is not None:
        visible &= rows[:, None] - columns[None] < window
    return visible


@torch.inference_mode()
def usable_rows(model: Any) -> tuple[int, ...]:
    """Returns the usable numbers of rows: those at which float32 matrix products and activations round as they do at 16.

    Where threads cut an activation into parts that are no multiple of a vector register, the odd elements take another path.

    Raises:
        ModelError: there are none.
    """
    if model.dtype != torch.float32 or model.device.type != "cpu":
        return BUCKETS
    shapes = {module.weight.shape: module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    usable = set(BUCKETS)
    generator = torch.Generator().manual_seed(0)
    for (_, width), linear in shapes.items():
        rows = torch.randn(BUCKETS[-1], width, generator=generator)
        reference = torch.cat([linear(part) for part in rows.split(MIN_ROWS)])
        for bucket in BUCKETS:
            # Every row must come out alike, wherever it stands.
            upright, upside_down = linear(rows[:bucket]), linear(rows[:bucket].flip(0)).flip(0)
            if not (torch.equal(upright, reference[:bucket]) and torch.equal(upside_down, reference[:bucket])):
                usable.discard(bucket)
    if not usable:
        raise ModelError("engine: no number of rows gives repeatable matrix products on this machine")
    head = model.get_output_embeddings()
    widths = {module.out_features for module in model.modules() if isinstance(module, torch.nn.Linear) and module is not head}
    even = {bucket for bucket in usable if all(_activations_are_even(bucket, width) for width in widths)}
    return tuple(sorted(even or usable))


def _activations_are_even(bucket: int, width: int) -> bool:
    rows = torch.randn(1, width, generator=torch.Generator().manual_seed(0))
    many = rows.expand(bucket, width).contiguous()
    alone = (functional.silu(rows), functional.gelu(rows, approximate="tanh"))
    together = (functional.silu(many), functional.gelu(many, approximate="tanh"))
    return all(bool((b == a).all()) for a, b in zip(alone, together, strict=True))


@torch.inference_mode()
def attention_problem(model: Any) -> str | None:
    """Returns why the model cannot run on ragged rows over a shared prompt, or None where it can.

    A path of eleven tokens (a prompt, a chunk, a single token) is tried against one plain forward pass.
    """
    device = model.device
    ids = (torch.arange(11, device=device) * 7 + 3) % model.config.get_text_config().vocab_size
    plain = decoder(model)(input_ids=ids[None], use_cache=False).last_hidden_state[0]
    prompt = Prompt(slot=0, token_ids=tuple(ids[:6].tolist()))
    row = Row(slot=0, prompt=prompt)
    parts = []
    try:
        prompts, rows = KeyValueStore.for_model(model, 1), KeyValueStore.for_model(model, 1)
        prompts.reserve(1)
        rows.reserve(1)
        cuts = (Segment(prompts, 0, 0, 6, 0, 0), Segment(rows, 0, 0, 4, 0, 6, row), Segment(rows, 0, 4, 1, 0, 6, row))
        with tree_attention(model):
            for cut in cuts:
                at = torch.arange(cut.base + cut.fed, cut.base + cut.fed + cut.count, device=device)
                plan = RaggedPlan(cut.count, prompts, rows, [cut])
                output = decoder(model)(input_ids=ids[at][None], position_ids=at[None], use_cache=False, attention_plan=plan)
                parts.append(output.last_hidden_state[0])
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        return f"its layers do not take our attention ({str(error).splitlines()[0]})"
    gap = float((torch.cat(parts) - plain).abs().max())
    limit = (1e-4 if model.dtype == torch.float32 else 0.1) * max(1.0, float(plain.abs().max()))
    return None if gap <= limit else f"its hidden states differ from those of a plain forward pass by up to {gap:.3g}"
