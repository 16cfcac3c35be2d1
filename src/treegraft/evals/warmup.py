"""The warm-up of a run: imitation of demonstrations, evaluated as it goes."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

from treegraft.assemble import TrainingParts
from treegraft.core.demonstration import solution
from treegraft.core.errors import DataError
from treegraft.evals.evaluate import evaluate
from treegraft.policy.learn.sft import Demonstrations, step_skill, warm_up
from treegraft.policy.publish import Publisher
from treegraft.rollout.watch import Watch
from treegraft.runs.run import Run
from treegraft.traces.demonstrations import read_demonstrations
from treegraft.traces.run_buffer import RunBuffer


async def demonstrations_of(
    run: Run, parts: TrainingParts, buffer: RunBuffer
) -> Demonstrations | None:
    """Returns the demonstrations of the remaining warm-up steps; None if their buffer is not built
    yet."""
    config, stored = run.config, None
    if config.warmup.traces != "expert":
        path = Path(os.path.expandvars(config.warmup.traces)).expanduser()
        if "warmup" in buffer.readers:
            path = buffer.file
            if buffer.is_due and not path.exists():
                return None
        has_environment = bool(config.environment.kind)
        chosen = read_demonstrations(
            path, config.warmup, parts.train_tasks, has_environment=has_environment
        )
        stored = chosen.demonstrations
        run.checkpoints.imitates(path, chosen.checksum())
        num_passes = config.warmup.num_steps * config.warmup.batch_size / len(stored)
        left_out = f"; left out: {chosen.left_out}" if chosen.left_out else ""
        run.display.note(
            f"the warm-up makes {num_passes:.3g} passes over {len(stored)} trajectories of"
            f" '{path}'{left_out}"
        )
    found = Demonstrations(
        parts.source, parts.format, config.warmup, config.run.seed, parts.show, stored
    )
    if found.left_out:
        run.display.warn(f"warmup.traces: {found.left_out}; these are not imitated")
    await found.prepare(run.state.warmup_steps)
    return found


async def warm_up_from(
    demonstrations: Demonstrations, run: Run, parts: TrainingParts, publisher: Publisher
) -> None:
    """Supervised fine-tuning on the demonstrations that are still to come."""
    settings, learner = run.config.warmup, parts.learner
    # A kill costs at most a quarter of the warm-up, unless no checkpoint but the last is asked for.
    save_every = max(1, settings.num_steps // (4 if run.config.checkpoint.every else 1))
    # An evaluation that was interrupted comes now.
    await evaluate_warmup(run, parts, publisher)
    await publisher.rest()
    began, cpu_began = time.monotonic(), time.process_time()

    async def on_step(done: int, loss: float, num_tokens: int) -> bool:
        nonlocal began, cpu_began
        spent = {
            "warmup/num_loss_tokens": float(num_tokens),
            "warmup/num_skipped_steps": float(math.isnan(loss)),
            "time/warmup_s": time.monotonic() - began,
            "time/warmup_cpu_s": time.process_time() - cpu_began,
        }
        run.warmed_up(done, {"warmup/loss": loss}, spent)
        run.display.phase("warm-up", done, settings.num_steps, f"loss {loss:.3f}")
        if done < settings.num_steps:
            if done % save_every == 0:
                run.save()
            await evaluate_warmup(run, parts, publisher)
            await publisher.rest()
        began, cpu_began = time.monotonic(), time.process_time()
        return run.stop.is_asked

    first = run.state.warmup_steps
    await warm_up(learner, demonstrations, settings, first_step=first, on_step=on_step)
    if run.state.warmup_steps == settings.num_steps:
        # AdamW's moments of imitation would go on pushing in its direction in the first updates.
        learner.forget_moments()
        run.warmed_up(settings.num_steps, await held_out_skill(run, parts), {})
        run.save()
    run.stop.raise_if_asked()


async def held_out_skill(run: Run, parts: TrainingParts) -> dict[str, float]:
    """Returns warmup/skill, where the expert solves held-out tasks."""
    solved = [(task, solution(parts.source, task, 0)) for task in parts.eval_tasks]
    held_out = [(task, steps) for task, steps in solved if steps]
    if parts.show is not None:
        try:
            held_out = await parts.show(held_out)
        except DataError as error:  # of a measurement alone, after all the work
            run.display.warn(f"warmup/skill is not measured: {error}")
            return {}
    return {"warmup/skill": step_skill(parts.learner, parts.format, held_out)} if held_out else {}


async def evaluate_warmup(run: Run, parts: TrainingParts, publisher: Publisher) -> None:
    """Evaluates after a warm-up step where that is due and not done; the trees are not kept."""
    if not (parts.eval_tasks and run.is_warmup_evaluation_due()):
        return
    await publisher.publish(0)
    watch = Watch()

    def report(*progress: Any) -> None:
        run.display.phase("evaluation", *progress)

    work = evaluate(parts, parts.eval_tasks, 0, watch=watch, on_progress=report)
    metrics = (await run.interruptible(work, waits_on=watch)).metrics
    parts.take_metrics()
    run.display.evaluated(f"warm-up step {run.state.warmup_steps}", metrics)
    run.log_warmup(metrics)
