"""Recipes and overrides of every shape: a sentence or a run, never a traceback, a hang or a folder
half made."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import string
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treegraft.cli import main as cli
from treegraft.core.errors import SettingError
from treegraft.settings.config import known_settings, tables_and_settings
from treegraft.settings.load import load_config

ROOT = Path(__file__).resolve().parents[2]
MAX_S = 10
"""Processor seconds of one input before its run folder is there."""
RECIPE = {
    "run.num_updates": "0",
    "model.tiny.hidden_size": "16",
    "model.tiny.num_heads": "2",
    "model.tiny.intermediate_size": "32",
    "tasks.num_train": "4",
    "tasks.num_eval": "2",
    "eval.at_start": "false",
    "eval.at_end": "false",
    "warmup.batch_size": "2",
}

NUMBERS = st.one_of(
    st.integers(-3, 5),
    st.sampled_from(
        [2**31, 2**63 - 1, 2**63, 2**70, -(2**63), 10**12, 10**4000, 1e-320, 1e308, 0.5, -0.5]
    ),
).map(str) | st.sampled_from(["inf", "-inf", "nan", "9" * 5000, "0x" + "f" * 5000, "1e999", "1_0"])
TEXTS = st.sampled_from(
    [
        "",
        " ",
        "none",
        "true",
        "null",
        "[]",
        "{}",
        "[[]]",
        "a\nb",
        "a\tb",
        "a\0b",
        "..",
        "/",
        "a/b",
        "~",
        "$HOME",
        "$NOWHERE/x",
        "/dev/null",
        "/dev/null/x",
        "/proc/x",
        "x" * 300,
        "x" * 5000,
        "\u202egnp.exe",
        "\ud800",
        "\ufeff",
        "é" * 200,
        "os:system",
        "os:getcwd",
        "json:loads",
        "math:pi",
        "no.such:thing",
        "a:b:c",
        ":",
        "builtins:dict",
        "sys:exit",
        "pypi:",
        "pypi:../../x",
        "pypi:no-such-package",
        "hub:",
        "hub:a/b:c/d",
        "tiny",
        "expert",
        "vllm",
        "graft",
        "entropy",
        "shares",
        "chat",
        "dataset",
        "arithmetic",
        "search_world",
        '["graft"]',
        '["entropy"]',
        '["os:system"]',
        '["python"]',
        '["a", "a"]',
        "[1, 2]",
        "[" * 3000,
        "{a = {a = 1}}",
        "[" * 40 + "]" * 40,
        "2026-01-01",
        "'",
        '"',
        "[0.9, 1.0]",
        '[{name = "x"}]',
        '[{name = "x", command = ["no-such-program"]}]',
        "{x = 1}",
    ]
) | st.text(max_size=20)
LITERALS = NUMBERS | TEXTS
NAMES = st.sampled_from(sorted(tables_and_settings())) | st.sampled_from(
    ["learning_rate", "data.train_files", "x" * 3000, "a" + ".b" * 40, "run.", ".", "+run.seed"]
)
# Not here: how long a run takes that is right.
FREE = [
    name
    for name in sorted(known_settings())
    if name not in ("run.num_updates", "warmup.num_steps", "tools.browse.allow_private")
]


class Hang(Exception):
    """More than MAX_S seconds and no run folder."""


@contextlib.contextmanager
def at_most(seconds: float, has_begun: Callable[[], bool] = lambda: False) -> Iterator[None]:
    def over(*_: Any) -> None:
        if not has_begun():
            raise Hang
        os.kill(os.getpid(), signal.SIGINT)  # saves and ends

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def profile(num: int) -> Callable[..., Any]:
    return settings(
        max_examples=num,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )


def check_load(source: object, overrides: list[str]) -> None:
    with at_most(MAX_S):
        try:
            load_config(source, overrides)  # type: ignore[arg-type]
        except SettingError as error:
            assert str(error).strip()
            assert all(len(line) < 2500 for line in str(error).splitlines()), str(error)[:500]


# --- overrides ------------------------------------------------------------------------------------

OVERRIDES = st.lists(st.tuples(NAMES, LITERALS).map("=".join) | TEXTS, min_size=1, max_size=3)


def check_overrides(overrides: list[str]) -> None:
    check_load({}, overrides)


test_overrides = profile(150)(given(OVERRIDES)(check_overrides))

# --- recipes --------------------------------------------------------------------------------------

OURS = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "recipes").glob("*.toml"))]
JUNK = st.sampled_from(
    [
        "[",
        "]",
        "=",
        '"',
        "'",
        "\n",
        "\r",
        "#",
        ".",
        "\\",
        "\ufeff",
        "\0",
        "x = " + "[" * 2000,
        "[run]\n",
        "a." * 2000 + "b = 1\n",
        "9" * 5000,
        "x = 1\n" * 3000,
        "[[tools.mcp]]\n",
        '"\\ud800"',
        "learn = 1\n",
        "[learn.lr]\nx = 1\n",
        "inf",
        "1979-05-27T07:32:00Z",
    ]
) | st.text(alphabet=string.printable, max_size=30)


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """Ours with parts left out and others put in, or anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    text = draw(st.sampled_from(OURS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 200)))
        text = text[:start] + draw(JUNK) + text[end:]
    return text.encode()


def check_recipe(folder: Path, data: bytes, suffix: str) -> None:
    path = folder / f"r{suffix}"
    path.write_bytes(data)
    check_load(path, [])


@profile(60)
@given(recipes(), st.sampled_from([".toml", ".toml", ".json"]))
def test_recipes(tmp_path: Path, data: bytes, suffix: str) -> None:
    check_recipe(tmp_path, data, suffix)


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a small recipe, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(cli, "_silence_others", lambda: None)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


def check_train(folder: Path, overrides: list[str], in_recipe: bool) -> str:
    """Trains, with the overrides typed or in the recipe, where those without effect may stay;
    returns how it ended: "refused", "run" or "failed" (a run that began)."""
    place = folder / "runs"
    lines = dict(RECIPE)
    if in_recipe:
        lines |= dict(override.split("=", 1) for override in overrides)
        overrides = []
    text = "".join(f"{name} = {value}\n" for name, value in lines.items())
    (folder / "r.toml").write_text(text, encoding="utf-8", errors="replace")
    shutil.rmtree(place, ignore_errors=True)
    before = set(os.listdir(folder))
    printed = io.StringIO()
    code = 0

    def has_begun() -> bool:
        return any(place.glob("*/config.json"))

    argv = sys.argv
    sys.argv = ["treegraft", "train", "r.toml", *overrides]
    try:
        with (
            contextlib.redirect_stderr(printed),
            contextlib.redirect_stdout(printed),
            at_most(MAX_S, has_begun),
        ):
            cli.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.argv = argv
    text = printed.getvalue()
    assert "Traceback" not in text, text[-2000:]
    assert code in (0, 1, 2, 3, 130), (code, text[-500:])
    if code == 0 or has_begun():
        return "failed" if code not in (0, 130) else "run"
    assert "error: " in text, text[-500:]
    left = set(os.listdir(folder)) - before - {"runs"}
    assert not left, left
    assert not place.exists() or not os.listdir(place), os.listdir(place)
    return "refused"


@st.composite
def typed(draw: st.DrawFn) -> str:
    """An override, two times of three with a value of the setting's own type."""
    name = draw(st.sampled_from(FREE))
    kind = str(known_settings()[name].field.annotation)
    if draw(st.integers(0, 2)) == 0:
        value = draw(LITERALS)
    elif "Literal" in kind:
        value = json.dumps(draw(st.sampled_from(re.findall(r"'(\w[\w-]*)'", kind) or ["x"])))
    elif "bool" in kind:
        value = draw(st.sampled_from(["true", "false"]))
    elif "int" in kind or "float" in kind or "Amount" in kind:
        value = draw(st.sampled_from(["0", "1", "2", "3", "7", "0.5", "16", "1000", str(10**9)]))
        value = f"[{value}]" if kind.startswith("list") else value
    else:
        value = draw(TEXTS)
        value = json.dumps([value] if kind.startswith("list") else value, ensure_ascii=False)
    return f"{name}={value}"


TYPED = st.lists(typed(), min_size=1, max_size=2)


@profile(6)
@given(TYPED, st.booleans())
def test_runs(alone: Path, overrides: list[str], in_recipe: bool) -> None:
    check_train(alone, overrides, in_recipe)
