"""What the parts share: the card, models of random weights, time, and the rows."""

from __future__ import annotations

import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.flops import Card, known_card
from treegraft.policy.shapes import ModelShape, published_shape
from treegraft.policy.tiny import build_byte_tokenizer, build_random_model

_TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement or one check."""

    part: str
    what: str
    value: float | None
    """None if it could not be measured; `note` says why."""
    unit: str
    bound: float | None = None
    """The best possible, or the limit of a check, in the same unit; None for none."""
    note: str = ""
    details: Mapping[str, float | None] = field(default_factory=dict)
    """Further numbers of the same measurement."""
    at_s: float = 0.0
    """Seconds since the first part began."""


@dataclass(frozen=True, slots=True)
class Work:
    """A piece of a part, which fails by itself."""

    name: str
    run: Callable[[Bench], None]
    limit_s: float = 120.0
    """Its process is ended after so many seconds, and the next work follows in another."""


@dataclass(kw_only=True)
class Bench:
    """The place and the time of the works."""

    part: str = ""
    """Name of the part under way."""
    ends_s: float
    """Seconds that all parts have together."""
    file: Path | None = None
    """Each row goes there at once, as one line of JSON."""
    is_tiny: bool = False
    """Tiny models and sizes on the CPU: a test of the benchmark, no measurement."""
    spent_s: float = 0.0
    """By processes before this one."""
    say: Callable[[str], None] = print
    until_s: float = field(default=float("inf"), init=False)
    """No row of the work under way is begun after so many seconds."""
    rows: list[Row] = field(default_factory=list, init=False)
    _begun: float = field(default_factory=time.monotonic, init=False)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.is_tiny else "cuda")

    @property
    def card(self) -> Card | None:
        """By its data sheet; None for a CPU or a card that is not known here."""
        return known_card(torch.cuda.get_device_name()) if self.device.type == "cuda" else None

    @property
    def seconds(self) -> float:
        """Since the first part began."""
        return self.spent_s + time.monotonic() - self._begun

    def pick(self, full: Any, tiny: Any) -> Any:
        """Returns the size for a measurement, or the one for a test."""
        return tiny if self.is_tiny else full

    def add(self, what: str, value: float | None, unit: str, **more: Any) -> None:
        """Writes a row."""
        row = Row(
            part=self.part, what=what, value=value, unit=unit, at_s=round(self.seconds, 1), **more
        )
        self.rows.append(row)
        self.say(line(asdict(row)))
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(asdict(row)) + "\n")

    def file_lines(self) -> list[str]:
        """Returns the rows that the file has."""
        return self.file.read_text(encoding="utf-8").splitlines() if self.file is not None else []

    @contextmanager
    def measure(self, what: str, unit: str) -> Iterator[None]:
        """A block that adds rows. Whatever it raises is a row: what does not fit the card's memory
        says so, anything else FAILED."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self.add(what, None, unit, note=f"out of memory: {first_line(error)}")
        except Exception as error:  # the next row may be had
            frames = traceback.extract_tb(error.__traceback__)
            calls = [f"{Path(one.filename).name}:{one.lineno}" for one in frames[1:]]
            where = " < ".join(reversed(calls[-3:]))
            note = f"FAILED {type(error).__name__}: {first_line(error)}, at {where}"
            self.add(what, None, unit, note=note)
        finally:
            gc.collect()
            if self.device.type == "cuda" and not self.is_spoiled():
                torch.cuda.empty_cache()

    def is_spoiled(self) -> bool:
        """Returns whether a fault of the card has ended all work of this process on it."""
        try:
            self.wait()
        except Exception:  # of whatever kind: nothing works any more
            return True
        return False

    def has_time(self, what: str) -> bool:
        """Whether a row may still begin; a row says that it was left out."""
        if self.seconds < min(self.ends_s, self.until_s):
            return True
        self.add(what, None, "", note="left out: the time of the part is over")
        return False

    def timed(self, work: Callable[[], Any]) -> float:
        """Returns the seconds that `work` takes, the device's included."""
        self.wait()
        begun = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    # ------------------------------------------------------------------ models and inputs

    def fields(self, name: str, **changes: Any) -> dict[str, Any]:
        """Returns the fields of a published shape, or of a tiny one of its kind."""
        found = published_shape(f"shape:{name}")
        return found | (_TINY if self.is_tiny else {}) | changes

    def shape(self, name: str, **changes: Any) -> ModelShape:
        """Returns the same for the formulas."""
        with torch.device("meta"):
            return ModelShape.of_model(
                build_random_model(self.fields(name, **changes), torch.float32, 0)
            )

    def model(self, name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
        """Returns a model of random weights on the device, without an end token, so that every
        completion has the length asked for."""
        with self.device:
            model = build_random_model(self.fields(name, **changes), dtype, 0).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    def tokenizer(self, name: str) -> Any:
        """Returns the tokenizer of such a model, without an end token."""
        tokenizer = build_byte_tokenizer(self.fields(name)["vocab_size"])
        tokenizer.eos_token = None
        return tokenizer

    def tokens(self, name: str, seed: int, count: int) -> list[int]:
        """Returns random token ids of the model's vocabulary."""
        draw = random.Random(f"tokens {seed}")
        return draw.choices(range(3, self.fields(name)["vocab_size"]), k=count)


def check(
    bench: Bench,
    what: str,
    value: float,
    limit: float,
    unit: str,
    note: str = "",
    details: Mapping[str, float | None] | None = None,
) -> None:
    """Adds a row that fails above `limit`, and for NaN."""
    note = note if value <= limit else f"FAILED {note}".strip()
    bench.add(what, value, unit, bound=limit, note=note, details=details or {})


def first_line(error: BaseException) -> str:
    """Returns the beginning of what an error says."""
    return (str(error).strip().splitlines() or ["nothing said"])[0][:160]


def line(row: Mapping[str, Any]) -> str:
    """Returns a row of the table."""
    value = "-" if row["value"] is None else f"{row['value']:.4g}"
    bound = "" if row["bound"] is None else f"{row['bound']:.4g}"
    details = [
        f"{name} {'-' if number is None else format(number, '.4g')}"
        for name, number in row["details"].items()
    ]
    note = ", ".join([*([row["note"]] if row["note"] else []), *details])
    return f"| {row['part']} | {row['what']} | {value} | {row['unit']} | {bound} | {note} |"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows in Markdown."""
    head = "| part | what | value | unit | bound | note |\n|---|---|---:|---|---:|---|\n"
    return head + "\n".join(map(line, rows)) + "\n"
