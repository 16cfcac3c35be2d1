"""What a worker process does: a warm-up, a buffer or a run, from wherever it stands to its end."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treegraft import Config, DataError, SettingError, TraceBuffer, load_config, sft, train
from treegraft.extras.lab.pruning.work import BufferPruning
from treegraft.extras.lab.study.calibration import calibrate
from treegraft.extras.lab.study.controls import CONTROLS
from treegraft.extras.lab.study.diversity import distances
from treegraft.extras.lab.study.plan import BufferPlan, RunPlan, WarmupPlan
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


def carry_out(job: WarmupPlan | BufferPlan | RunPlan, out: Path) -> Line:
    """Does one job in the study's folder `out`, goes on with it, or finds it done.

    Returns:
        Of a run its results; of a warm-up and a buffer its costs.

    Raises:
        KeyboardInterrupt: a signal has ended it; the next call goes on from there.
        TreegraftError: it has failed.
    """
    logging.disable(logging.WARNING)
    if isinstance(job, RunPlan):
        return _run(job, out)
    note = note_of(job, out)
    if note.is_file():
        return read_note(note)
    if isinstance(job, WarmupPlan):
        costs = _warm_up(job, out)
    else:
        sittings = _Sittings(out / f"{job.file}.sittings.json")
        if job.source is None:
            costs = _build(job, out, sittings)
        elif job.control:
            costs = _mix_up(job, job.source, out)
        else:
            costs = _prune(job, job.source, out, sittings)
        costs = sittings.total | costs
    costs["fingerprint"] = job.fingerprint
    files.write_atomically(note, json.dumps(costs) + "\n")
    return costs


class _Sittings(NoDisplay):
    """What the parts of an interrupted job have cost, written at each step of its progress."""

    def __init__(self, path: Path) -> None:
        self._path, self._calibration_s = path, calibrate()
        self._before: Line = {}
        if path.is_file():
            self._before = dict(read_note(path))
            # In seconds of this sitting's machine.
            self._before["cpu_s"] = self.scaled(self._before)
        self.now: Callable[[], Mapping[str, float]] = dict

    def scaled(self, costs: Line) -> float:
        """Returns the seconds of costs as those of this sitting's calibration."""
        return float(costs["cpu_s"] * self._calibration_s / costs["calibration_s"])

    @property
    def total(self) -> Line:
        """The costs so far."""
        now = self.now()
        counts = {name: self._before.get(name, 0) + value for name, value in now.items()}
        return counts | {"calibration_s": self._calibration_s}

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        """Something has been stored."""
        files.write_atomically(self._path, json.dumps(self.total) + "\n")

    def forget(self) -> None:
        """Leaves out what was spent on a part that is lost and made again."""
        self._path.unlink(missing_ok=True)
        self._before = {}


def note_of(job: WarmupPlan | BufferPlan, out: Path) -> Path:
    """Returns the file that says that a warm-up or buffer is complete, and what it cost."""
    place = out / (job.folder if isinstance(job, WarmupPlan) else job.file)
    return place.with_name(f"{place.name}.json")


def read_note(note: Path) -> Line:
    """Returns the costs of a complete warm-up or buffer."""
    found = json.loads(note.read_bytes())
    if not isinstance(found, dict):
        raise DataError(
            f"'{note}' is damaged; expected an object. Remove it, and it is made again.",
            code="study-note-damaged",
        )
    return found


def _trained(command: str, config: Config, place: Path) -> None:
    """Trains a run in its folder, or goes on with it."""
    act = {"train": train, "sft": sft}[command]
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
    calibration_s, place = calibrate(), out / job.folder
    _trained("sft", job.config, place)
    # Of its steps alone, those before an interruption included.
    spent = sum(line.get("time/warmup_cpu_s", 0.0) for line in RunReader(place).clean_metrics()[0])
    return {"cpu_s": spent, "calibration_s": calibration_s}


def _build(job: BufferPlan, out: Path, sittings: _Sittings) -> Line:
    place = out / job.file
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.partial")
    if place.exists():
        # Complete, but killed before its note.
        place.replace(partial)
    own = {
        "agent": job.agent,
        "num_samples": job.samples,
        "num_best": job.keep,
        "min_reward": job.min_reward,
        "num_tasks": job.num_tasks,
    }
    data = job.config.model_dump(mode="json", exclude_unset=True)
    work = BufferBuild(load_config(recipe.merged(data, {"buffer": {"build": own}})), partial)
    report = work.report
    sittings.now = lambda: {
        "cpu_s": report.cpu_s,
        "attempts": report.num_attempts,
        "calls": report.num_calls,
    }
    work.run(display=sittings)
    if work.stopped_by is not None:
        raise interrupt.Ended(work.stopped_by)
    with TraceBuffer(partial, job.config.buffer.encoder) as buffer:
        num_stored = sum(1 for _ in buffer.trajectories())
        buffer.fold()
    partial.replace(place)
    return {"trajectories": num_stored}


def _prune(job: BufferPlan, source: BufferPlan, out: Path, sittings: _Sittings) -> Line:
    assert job.warmup is not None
    place, before = out / job.file, read_note(note_of(source, out))
    if place.exists():
        # Complete, but killed before its note: quickly made again.
        place.unlink()
        sittings.forget()
    work = BufferPruning.of(
        job.config,
        model=str(_start(job.warmup, out)),
        buffer=out / source.file,
        out=place,
        margin=job.margin,
        only_best=job.only_best,
    )
    report = work.report
    sittings.now = lambda: {"cpu_s": report.cpu_s}
    work.run(display=sittings)
    if work.stopped_by is not None:
        raise interrupt.Ended(work.stopped_by)
    return {
        "trajectories": report.num_trajectories,
        "shortened": report.num_shortened,
        "steps_cut": report.num_cut,
        "attempts": before["attempts"],
        "calls": before["calls"],
        "cpu_s": sittings.total["cpu_s"] + sittings.scaled(before),
    }


def _mix_up(job: BufferPlan, source: BufferPlan, out: Path) -> dict[str, Any]:
    """Makes a control; it costs what its source did."""
    place = out / job.file
    # Left by a process that was killed: quickly made again.
    for leftover in place.parent.glob(f"{place.name}*"):
        leftover.unlink()
    with (
        TraceBuffer.open_as_built(out / source.file) as before,
        TraceBuffer(place, before.load_encoder()) as mixed,
    ):
        mixed.add(CONTROLS[job.control](before.trajectories(), job.config.run.seed))
        num_stored = sum(1 for _ in mixed.trajectories())
    return {**read_note(note_of(source, out)), "trajectories": num_stored}


def _start(warmup: WarmupPlan, out: Path) -> Path:
    """The checkpoint of a warm-up."""
    found = RunReader(out / warmup.folder).latest_checkpoint()
    if found is None:
        raise errors.CheckpointError(
            f"'{out / warmup.folder}' has no checkpoint; expected one. Remove the folder and its"
            " .json, and the warm-up is trained again.",
            code="warmup-without-checkpoint",
        )
    return found


def checksum(checkpoint: Path) -> str:
    """Returns a checksum of a checkpoint's weights. The same warm-up on another kind of processor
    has another one."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as opened:
            while piece := opened.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def _run(job: RunPlan, out: Path) -> Line:
    place = out / job.folder
    more: dict[str, Any] = {}
    if job.warmup is not None:
        more["model"] = {"path": str(_start(job.warmup, out))}
    if job.buffer is not None:
        more["buffer"] = {"path": str(out / job.buffer.file)}
    weights = {} if job.warmup is None else {"weights": checksum(_start(job.warmup, out))}
    calibration_s = calibrate()
    _trained(job.command, _placed(job.config, place, more), place)
    reader = RunReader(place)
    costs = {
        kind: read_note(note_of(one, out))
        for kind, one in (("warmup", job.warmup), ("buffer", job.buffer))
        if one is not None
    }
    metrics = reader.clean_metrics()[0]
    return {
        "command": job.command,
        "calibration_s": calibration_s,
        "num_eval": job.config.tasks.num_eval,
        "curve": curve(metrics, reader.warmup_metrics()),
        "updates": by_update(metrics, distances(reader) if job.config.track.record_trees else {}),
        **weights,
        **costs,
    }
