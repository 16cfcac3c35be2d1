"""What a worker process does: a warm-up, a buffer or a run, from its last checkpoint to its end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pkgutil
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from treegraft import Config, DataError, SettingError, TraceBuffer, load_config, sft, train
from treegraft.extras.lab.study.plan import BufferPlan, Job, RunPlan, WarmupPlan
from treegraft.extras.lab.study.results import Line, by_update, curve
from treegraft.parts import (
    BufferBuild,
    NoDisplay,
    RunReader,
    errors,
    files,
    interrupt,
    recipe,
)


def carry_out(job: Job, out: Path) -> Line:
    """Does one job in the study's folder `out`, goes on with it, or finds it done.

    Returns:
        Of a run its results; of a warm-up and a buffer its costs.

    Raises:
        KeyboardInterrupt: a signal has ended it; the next call goes on from there.
        TreegraftError: it has failed.
    """
    # Warnings of hundreds of runs would drown the study's own lines.
    logging.disable(logging.WARNING)
    if isinstance(job, RunPlan):
        return _run(job, out)
    # It is written last, so that a job without one is not complete.
    note = note_of(job, out)
    if note.is_file():
        return read_note(note)
    if isinstance(job, WarmupPlan):
        costs = _warm_up(job, out)
    else:
        assert isinstance(job, BufferPlan)
        place = out / job.place
        # Of a process that was killed or interrupted: a buffer is made again as a whole.
        for leftover in place.parent.glob(f"*{place.name}*"):
            leftover.unlink()
        place.parent.mkdir(parents=True, exist_ok=True)
        costs = _build(job, place) if job.source is None else _make(job, job.source, out)
    costs["fingerprint"] = job.fingerprint
    files.write_atomically(note, json.dumps(costs) + "\n")
    return costs


def note_of(job: Job, out: Path) -> Path:
    """Returns the file that says that a warm-up or buffer is complete, and what it cost."""
    return out / f"{job.place}.json"


def read_note(note: Path) -> Line:
    """Returns the costs of a complete warm-up or buffer."""
    found = json.loads(note.read_bytes())
    if not isinstance(found, dict):
        raise DataError(
            f"'{note}' is damaged; expected an object. Remove it, and it is made again.",
            code="study-note-damaged",
        )
    return found


def _trained(command: str | None, config: Config, place: Path) -> None:
    """Trains a run in its folder, or goes on with it."""
    act = sft if command == "sft" else train
    if place.exists():
        try:
            load_config(place / "config.json")
        except SettingError:
            # Killed before its settings were written: nothing is lost.
            shutil.rmtree(place)
        else:
            act(None, resume=place, display=False)
            return
    act(_placed(config, place), display=False)


def _placed(config: Config, place: Path, more: Mapping[str, Any] | None = None) -> Config:
    data = config.model_dump(mode="json", exclude_unset=True)
    run = {"run": {"dir": str(place.parent), "name": place.name}}
    return load_config(recipe.merged(data, run, more or {}))


def _warm_up(job: WarmupPlan, out: Path) -> Line:
    # Before the work, by the same process: the load of the machine changes within minutes.
    calibration_s = calibrate()
    place = out / job.place
    _trained("sft", job.config, place)
    # Of its steps alone, those before an interruption included.
    spent = sum(line.get("time/warmup_cpu_s", 0.0) for line in RunReader(place).clean_metrics()[0])
    return {"cpu_s": spent, "calibration_s": calibration_s}


def _build(job: BufferPlan, place: Path) -> Line:
    calibration_s = calibrate()
    # Renamed once it is complete; a name with a dot is no buffer of a run.
    partial = place.with_name(f".{place.name}.partial")
    own = {
        "agent": "expert",
        "num_samples": job.own.samples,
        "num_best": job.own.keep,
        "min_reward": job.own.min_reward,
    }
    data = job.config.model_dump(mode="json", exclude_unset=True)
    work = BufferBuild(load_config(recipe.merged(data, {"buffer": {"build": own}})), partial)
    work.run(display=NoDisplay())
    if work.stopped_by is not None:
        raise interrupt.Ended(work.stopped_by)
    with TraceBuffer(partial, job.config.buffer.encoder) as buffer:
        num_stored = sum(1 for _ in buffer.trajectories())
        # Into one file, since a write-ahead log would not go along with the renaming.
        buffer.fold()
    partial.replace(place)
    return {
        "cpu_s": work.report.cpu_s,
        "attempts": work.report.num_attempts,
        "calls": work.report.num_calls,
        "calibration_s": calibration_s,
        "trajectories": num_stored,
    }


def _make(job: BufferPlan, source: BufferPlan, out: Path) -> Line:
    """Makes a buffer from another one; it costs what its source did, too."""
    calibration_s = calibrate()
    costs = read_note(note_of(source, out))
    counts = _maker(job)(
        out / source.place,
        out / job.place,
        config=job.config,
        seed=job.config.run.seed,
        checkpoint=None if job.warmup is None else _start(job.warmup, out),
    )
    # In seconds of the source's calibration.
    own_s = counts.get("cpu_s", 0.0) * costs["calibration_s"] / calibration_s
    return {**costs, **counts, "cpu_s": costs["cpu_s"] + own_s}


def _maker(job: BufferPlan) -> Callable[..., Mapping[str, float]]:
    # A console script does not see its working directory.
    sys.path.append(os.getcwd())
    try:
        found: Callable[..., Mapping[str, float]] = pkgutil.resolve_name(job.own.maker)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingError(
            f"{job.title}: maker '{job.own.maker}' cannot be loaded ({error}); expected"
            " package.module:function. Start from the folder that holds the package.",
            code="maker-missing",
        ) from error
    return found


def _start(warmup: WarmupPlan, out: Path) -> Path:
    """The checkpoint of a warm-up."""
    found = RunReader(out / warmup.place).latest_checkpoint()
    if found is None:
        raise errors.CheckpointError(
            f"'{out / warmup.place}' has no checkpoint; expected one. Remove the folder and its"
            " .json, and the warm-up is trained again.",
            code="warmup-without-checkpoint",
        )
    return found


def checksum(checkpoint: Path) -> str:
    """Returns a checksum of a checkpoint's weights. The same warm-up on another kind of processor
    has another one."""
    # Short, for every line has one: it has to differ between a few machines alone.
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def _run(job: RunPlan, out: Path) -> Line:
    place = out / job.place
    found: Line = {"command": job.own.command or "train", "num_eval": job.config.tasks.num_eval}
    more: dict[str, Any] = {}
    if job.warmup is not None:
        start = _start(job.warmup, out)
        more["model"] = {"path": str(start)}
        found["weights"] = checksum(start)
        found["warmup"] = read_note(note_of(job.warmup, out))
    if job.buffer is not None:
        more["buffer"] = {"path": str(out / job.buffer.place)}
        found["buffer"] = read_note(note_of(job.buffer, out))
    found["calibration_s"] = calibrate()
    _trained(job.own.command, _placed(job.config, place, more), place)
    reader = RunReader(place)
    metrics = reader.clean_metrics()[0]
    found["curve"] = curve(metrics, reader.warmup_metrics())
    found["updates"] = by_update(metrics)
    return found


NUM_PRODUCTS = 1500
NUM_HASHES = 300_000
"""About as much plain Python as matrix arithmetic, as in the runs of small models."""


def calibrate() -> float:
    """Returns the CPU seconds of a fixed small computation in this process, some tenths, by which
    those of different machines are compared. Other work on the machine slows it
    down, as it does runs."""
    matrix = np.full((128, 128), 1 / 128, dtype=np.float32)
    digest = b""
    began = time.process_time()
    for _ in range(NUM_PRODUCTS):
        matrix = matrix @ matrix
    for number in range(NUM_HASHES):
        digest = hashlib.blake2b(digest + number.to_bytes(4), digest_size=8).digest()
    return time.process_time() - began
