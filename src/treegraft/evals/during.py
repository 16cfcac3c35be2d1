"""Measuring the agent on held-out tasks while it trains."""

from __future__ import annotations

import time

from treegraft.assemble import Parts
from treegraft.core.errors import DataError
from treegraft.core.spans import span
from treegraft.evals.evaluate import Evaluation, evaluate
from treegraft.rollout.measure import paired_gain
from treegraft.rollout.watch import Watch
from treegraft.runs.run import Run
from treegraft.runs.tree_files import find_part


async def evaluate_and_keep(run: Run, parts: Parts) -> None:
    """Evaluates, logs and keeps the state after an update, or before the first one (update 0),
    unless that is done."""
    if run.state.is_closed:
        return
    evaluated: dict[str, float] = {}
    if is_evaluation_due(run, parts):
        watch = Watch()
        with span("evaluation", update=run.state.update):
            evaluated = await run.interruptible(evaluate_update(run, parts, watch), waits_on=watch)
    run.keep_update(evaluated)


def is_evaluation_due(run: Run, parts: Parts) -> bool:
    """Returns whether the held-out tasks are evaluated after the present update."""
    settings, number = run.config.eval, run.state.update
    if not parts.eval_tasks:
        return False
    if number == 0:
        return settings.at_start
    is_last = settings.at_end and run.is_over
    return is_last or bool(settings.every and number % settings.every == 0)


async def evaluate_update(run: Run, parts: Parts, watch: Watch) -> dict[str, float]:
    """Returns the metrics of the held-out tasks; their trees go to files of their own."""
    began, number = time.monotonic(), run.state.update
    evaluation = await evaluate(
        parts,
        parts.eval_tasks,
        number,
        watch=watch,
        on_progress=lambda *progress: run.display.phase("evaluation", *progress),
    )
    # Counts of the evaluation belong to no update.
    parts.take_metrics()
    for kind, trees in evaluation.passes.items():
        run.reporter.trees(number, trees, kind)
    metrics = evaluation.metrics
    if run.is_warmup_evaluation_due():
        run.log_warmup(metrics)
    if run.is_over:
        metrics |= gain_since_start(run, evaluation)
    run.display.evaluated(f"update {number}" if number else "start", metrics)
    return metrics | {"time/eval_s": time.monotonic() - began}


def gain_since_start(run: Run, evaluation: Evaluation) -> dict[str, float]:
    """Returns how much better the end is than the start, where both were recorded."""
    metrics: dict[str, float] = {}
    run.reporter.written()
    for kind, after in evaluation.passes.items():
        part = find_part(run.folder.trees_path(0, kind))
        if part is not None and run.state.update > 0:
            name = "eval/gain" if kind == "greedy" else "eval/gain_sampled"
            try:
                before = [*part.trees()]
            except DataError as error:
                run.display.warn(f"{error}: no {name}")
                continue
            if {tree.task.id for tree in before} != {tree.task.id for tree in after}:
                run.display.warn(f"{part.label} has other tasks than this evaluation: no {name}")
                continue
            gain, low, high = paired_gain(before, after)
            metrics |= {name: gain, f"{name}_low": low, f"{name}_high": high}
    return metrics
