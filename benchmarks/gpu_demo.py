"""A real model learns on one card by ARPO and the python tool, in pieces of minutes, and its curve.

    python -m benchmarks.gpu_demo /weights/Qwen2.5-1.5B-Instruct

Run it again, with the same folder, and it goes on where it was: a piece ends after the update that
would leave no time for another one, or is interrupted at the next safe point. Each update and each
failure is one line of JSON in OUT/demo.jsonl; OUT/demo.md is the curve. `--device cpu` trains a
tiny model of random weights, which learns nothing: a test of this program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).with_suffix(".toml")
GRACE_FRAC = 0.1
"""Share of a piece that is kept for saving."""
_BARS = " ▁▂▃▄▅▆▇█"
SHOWN = (
    "reward/mean",
    "eval/accuracy",
    "rollout/completed_frac",
    "rollout/tool_calls_mean",
    "learn/engine_gap",
)
PHASES = ("rollout", "learn", "publish", "update")


def main(arguments: list[str] | None = None) -> int:
    """Trains for one piece and returns the exit code: 0 also where updates are left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_demo")
    parser.add_argument("model", nargs="?", help="folder of weights or hub id; of a new run")
    parser.add_argument(
        "--out", type=Path, default=Path("build/gpu"), help="folder of run and rows"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="of this piece, start included")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("settings", nargs="*", help="such as run.num_updates=20")
    asked = parser.parse_args(arguments)
    if asked.model and "=" in asked.model:
        asked.settings.insert(0, asked.model)
        asked.model = None
    asked.out.mkdir(parents=True, exist_ok=True)
    rows = asked.out / "demo.jsonl"
    if asked.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    begun = time.monotonic()
    try:
        said = _piece(asked, begun)
        code = 0
    except KeyboardInterrupt:  # ours, or a person's; all is saved
        said, code = "interrupted, saved", 0
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        lines = str(error).strip().splitlines() or [""]
        said = f"FAILED {type(error).__name__}: {lines[0][:300]}"
        said += f", at {Path(last.filename).name}:{last.lineno}"
        code = 1
    folder = asked.out / "demo"
    metrics = _metrics(folder)
    done = int(metrics[-1]["update"]) if metrics else 0
    note = {"piece_s": round(time.monotonic() - begun, 1), "updates": done, "note": said}
    with rows.open("a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")
    text = curve(metrics)
    (asked.out / "demo.md").write_text(text, encoding="utf-8")
    print(json.dumps(note))
    print(text)
    return code


def _piece(asked: argparse.Namespace, begun: float) -> str:
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("no CUDA device; --device cpu trains a tiny model, as a test")
    from treegraft.settings.load import load_config
    from treegraft.train import train

    until = begun + 60 * asked.minutes
    folder, rows = asked.out / "demo", asked.out / "demo.jsonl"
    updates: list[float] = [time.monotonic()]

    def took(update: int, metrics: Mapping[str, float]) -> bool:
        """Writes the update's row; False ends the piece."""
        now = time.monotonic()
        # Before update 0 come the model and the warm-up, which are not repeated.
        last = now - updates[-1] if update else 0.0
        updates.append(now)
        keys = (*SHOWN, *(f"time/{one}_s" for one in PHASES))
        found = {key: metrics[key] for key in keys if key in metrics}
        with rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"update": update} | found) + "\n")
        return bool(now + last + GRACE_FRAC * 60 * asked.minutes < until)

    # For an update that takes longer than the one before. Before the run listens, nothing is lost.
    signal.signal(signal.SIGUSR1, _interrupt)
    alarm = threading.Timer(until - time.monotonic(), os.kill, (os.getpid(), signal.SIGUSR1))
    alarm.daemon = True
    alarm.start()
    try:
        if (folder / "config.json").exists():
            changes = [one for one in asked.settings if one.startswith("run.num_updates=")]
            config = None if not changes else _changed(folder, changes)
            train(config, resume=folder, callbacks=[took], display=False)
            return "went on"
        smoke = asked.device == "cpu"
        given = [f"run.dir={json.dumps(str(asked.out))}", 'run.name="demo"', *asked.settings]
        if asked.model:
            given.append(f"model.path={json.dumps(asked.model)}")
        elif not smoke:
            raise SystemExit("a new run needs a model: a folder of weights, or a hub id")
        train(load_config(RECIPE, given, smoke=smoke), callbacks=[took], display=False)
        return "begun"
    finally:
        alarm.cancel()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _changed(folder: Path, changes: Sequence[str]) -> Any:
    from treegraft.runs.start import own_config
    from treegraft.settings.load import load_config

    return load_config(own_config(folder), changes)


def _metrics(folder: Path) -> list[dict[str, float]]:
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def curve(metrics: Sequence[Mapping[str, float]]) -> str:
    """Returns the run in Markdown: a line of bars for each number that has some, and its ends."""
    lines = ["| number | first | last | over the updates |", "|---|---:|---:|---|"]
    for key in SHOWN:
        values = [one[key] for one in metrics if key in one]
        if not values:
            continue
        low, high = min(values), max(values)
        steps = [round((one - low) / (high - low or 1.0) * (len(_BARS) - 1)) for one in values]
        bars = "".join(_BARS[step] for step in steps)
        lines.append(f"| {key} | {values[0]:.3f} | {values[-1]:.3f} | {bars} |")
    for one in PHASES:
        seconds = sorted(line[f"time/{one}_s"] for line in metrics if f"time/{one}_s" in line)
        if seconds:
            middle = seconds[len(seconds) // 2]
            lines.append(f"| median seconds of {one} | {middle:.1f} | | |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
