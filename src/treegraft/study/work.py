"""What a worker process does: a warm-up, a buffer or a run, from wherever it stands to its end."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treegraft.core.errors import CheckpointError, DataError
from treegraft.core.files import parse_json, write_atomically
from treegraft.core.interrupt import Ended
from treegraft.core.types import StepContent
from treegraft.runs.checkpoint import latest_checkpoint
from treegraft.runs.display import NoDisplay
from treegraft.runs.record import read_metrics
from treegraft.runs.start import own_config
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.recipe import merged
from treegraft.study.calibration import calibrate
from treegraft.study.plan import BufferPlan, RunPlan, WarmupPlan
from treegraft.study.results import Line, curve

WARMUP = "warmup.jsonl"


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
    began = time.process_time()
    if isinstance(job, WarmupPlan):
        costs = _warm_up(job, out)
    else:
        costs = _build(job, out) if job.source is None else _prune(job, job.source, out)
    spent = time.process_time() - began + costs.pop("source_cpu_s", 0.0)
    costs |= {"cpu_s": spent, "calibration_s": calibrate()}
    write_atomically(note, json.dumps(costs) + "\n")
    return costs


def note_of(job: WarmupPlan | BufferPlan, out: Path) -> Path:
    """Returns the file that says that a warm-up or buffer is complete, and what it cost."""
    place = out / (job.folder if isinstance(job, WarmupPlan) else job.file)
    return place.with_name(f"{place.name}.json")


def read_note(note: Path) -> Line:
    """Returns the costs of a complete warm-up or buffer."""
    found = parse_json(note.read_bytes())
    if not isinstance(found, dict):
        raise DataError(
            f"'{note}' is damaged; expected an object. Remove it, and it is made again."
        )
    return found


def _trained(command: str, config: Config, place: Path) -> None:
    """Trains a run in its folder, or goes on with it."""
    from treegraft.train import sft, train

    act = {"train": train, "sft": sft}[command]
    display = NoDisplay()
    if place.exists():
        try:
            own_config(place)
        except CheckpointError:
            # Killed before its settings were written: nothing is lost.
            shutil.rmtree(place)
        else:
            act(None, resume=place, display=display)
            return
    act(_placed(config, place), display=display)


def _placed(config: Config, place: Path, more: Mapping[str, Any] | None = None) -> Config:
    data = config.model_dump(mode="json", exclude_unset=True)
    run = {"run": {"dir": str(place.parent), "name": place.name}}
    return load_config(merged(data, run, more or {}))


def _warm_up(job: WarmupPlan, out: Path) -> Line:
    _trained("sft", job.config, out / job.folder)
    return {}


def _build(job: BufferPlan, out: Path) -> Line:
    from treegraft.traces.buffer import TraceBuffer
    from treegraft.traces.fill import AgentChoice, BufferBuild

    place = out / job.file
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(f".{place.name}.partial")
    choice = AgentChoice(
        agent=job.agent,
        model=None,
        source=None,
        temperature=None,
        max_tokens=None,
        timeout_s=None,
        max_retries=None,
        api_key_env=None,
        num_samples=job.samples,
        concurrency=None,
    )
    work = BufferBuild(job.config, choice, partial, job.config.buffer.encoder)
    work.run(job.keep, job.min_reward, job.num_tasks, display=NoDisplay())
    if work.stopped_by is not None:
        raise Ended(work.stopped_by)
    with TraceBuffer(partial, job.config.buffer.encoder) as buffer:
        stored = list(buffer.trajectories())
    partial.replace(place)
    # A trajectory's last step answers; each of the others made a call or more.
    values = (step.value for steps in stored for step in steps)
    calls = sum(len(value.calls) for value in values if isinstance(value, StepContent))
    return {"attempts": work.report.num_attempts, "trajectories": len(stored), "calls": calls}


def _prune(job: BufferPlan, source: BufferPlan, out: Path) -> Line:
    from treegraft.traces.prune_buffer import BufferPruning, PruneChoice

    assert job.warmup is not None
    place, before = out / job.file, read_note(note_of(source, out))
    # Complete, but killed before its note: quickly made again.
    place.unlink(missing_ok=True)
    choice = PruneChoice(
        model=str(_start(job.warmup, out)),
        buffer=out / source.file,
        out=place,
        margin=job.margin,
        only_best=job.only_best,
    )
    work = BufferPruning(job.config, choice)
    work.run(display=NoDisplay())
    if work.stopped_by is not None:
        raise Ended(work.stopped_by)
    report = work.report
    return {
        "trajectories": report.num_trajectories,
        "shortened": report.num_shortened,
        "steps_cut": report.num_cut,
        # Those of the trajectories as they were stored: somebody made them.
        "calls": before["calls"],
        "source_cpu_s": before["cpu_s"],
    }


def _start(warmup: WarmupPlan, out: Path) -> Path:
    """The checkpoint of a warm-up."""
    found = latest_checkpoint(out / warmup.folder / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"'{out / warmup.folder}' has no checkpoint; expected one. Remove the folder and its"
            " .json, and the warm-up is trained again."
        )
    return found


def _run(job: RunPlan, out: Path) -> Line:
    place = out / job.folder
    more: dict[str, Any] = {}
    if job.warmup is not None:
        more["model"] = {"path": str(_start(job.warmup, out))}
    if job.buffer is not None:
        more["buffer"] = {"path": str(out / job.buffer.file)}
    calibration_s = calibrate()
    _trained(job.command, _placed(job.config, place, more), place)
    has_warmup = (place / WARMUP).is_file()
    warmup = read_metrics(place, WARMUP) if has_warmup else []
    costs = {
        kind: read_note(note_of(one, out))
        for kind, one in (("warmup", job.warmup), ("buffer", job.buffer))
        if one is not None
    }
    return {
        "command": job.command,
        "calibration_s": calibration_s,
        "num_eval": job.config.tasks.num_eval,
        "curve": curve(read_metrics(place), warmup),
        **costs,
    }
