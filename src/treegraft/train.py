"""Training: a loop over a session, which samples and learns, and a run, which records.

The state between two updates is small: weights, optimiser, and the counters in `TrainState`.
Everything else is a function of the settings, the seed and the update's number, so a resumed run
repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from treegraft.core.interfaces import Display
from treegraft.launch import Options, opened
from treegraft.runs.result import RunResult
from treegraft.runs.run import Run
from treegraft.session import Session
from treegraft.settings.objects import Objects, Source


def train(
    config: Source | None = None,
    *,
    recipe: str | None = None,
    resume: Path | str | None = None,
    accepts_changes: bool = False,
    display: Display | bool | None = None,
    placement: str | None = None,
    callbacks: Sequence[object] = (),
    **objects: Unpack[Objects],
) -> RunResult:
    """Trains an agent and returns its results.

    Args:
        config: settings, a dict, or a recipe's path. With `resume`, None takes the run's
            settings; others may differ only in settings that a resume may change.
        recipe: name of the recipe, for the run folder's default name.
        resume: a run folder to continue from its latest checkpoint.
        accepts_changes: with `resume`, whether to go on although metrics, recorded evaluations or
            the buffer have changed since the checkpoint. The run then differs from an undisturbed
            one.
        display: True shows progress on standard output, False nothing, None progress in a
            terminal or a notebook. A display of your own (`core.interfaces.Display`) works too.
        placement: place of engines and growers, such as "ray"; None means this process.
        callbacks: functions called with (update, metrics) after each update, or objects with some
            of a tracker's methods. One that returns False ends the run after that update.
        objects: Python objects in place of settings, see `Objects`.

    Raises:
        TreegraftError: bad input, before any work starts if possible.
        KeyboardInterrupt: after Ctrl-C, with everything saved; its kind `Ended` after SIGTERM,
            SIGHUP or SIGUSR1.
    """
    begun = opened(
        config,
        "train",
        recipe=recipe,
        resume=resume,
        accepts_changes=accepts_changes,
        display=display,
        placement=placement,
        callbacks=callbacks,
        **objects,
    )
    with begun as (run, session):
        if run.is_finished:
            return run.result()
        warm_up(run, session)
        session.begin_updates()
        evaluate(run, session)
        for update in run.updates():
            trees = session.sample(update)
            trees = session.credit(trees)
            # Before the weights reach the engine: law 7 compares what both say of these trees.
            trees = session.learn(trees, update, run.budget_used)
            session.sync_weights(update)
            run.record(update, trees.recorded, session.pop_metrics(), session.state())
            evaluate(run, session)
        return run.result()


def sft(config: Source | None = None, **options: Unpack[Options]) -> RunResult:
    """Runs the warm-up alone and returns where the results are; arguments and errors as in
    `train`."""
    with opened(config, "sft", **options) as (run, session):
        warm_up(run, session)
        run.log_pending()
        return run.result()


def warm_up(run: Run, session: Session) -> None:
    """Imitates demonstrations, as far as that is asked for and left to do."""
    evaluate_warm_up(run, session)
    for step in session.warm_up():
        run.record_warm_up(step)
        evaluate_warm_up(run, session)


def evaluate_warm_up(run: Run, session: Session) -> None:
    """Evaluates after a step of the warm-up if that is due."""
    if run.is_warm_up_evaluation_due():
        # The engine has the weights from before this step still.
        session.sync_weights(0)
        run.log_warm_up(session.evaluate())


def evaluate(run: Run, session: Session) -> None:
    """Closes an update, or the time before the first one, with its evaluation if that is due."""
    run.close(session.evaluate() if run.is_evaluation_due() else None)
