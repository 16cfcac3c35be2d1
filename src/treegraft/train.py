"""The story of a run: warm up, then update after update - sample, credit, learn, publish, keep.

The state between two updates is small: weights, optimiser, and the counters in `TrainState`.
Everything else is a function of the settings, the seed and the update's number, so a resumed run
repeats an uninterrupted one bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from treegraft.core.interfaces import Display
from treegraft.core.spans import span
from treegraft.core.types import Tree
from treegraft.evals.during import evaluate_and_keep
from treegraft.launch.training import LaunchOptions, Training, launched, prepared
from treegraft.policy.learn.credit import credit_by_entropy
from treegraft.policy.learn.lessons import Given
from treegraft.policy.learn.symptoms import symptoms
from treegraft.rollout.measure import rollout_metrics, unused_metrics
from treegraft.rollout.placement import Placement
from treegraft.rollout.rounds import Sampled, sample_update
from treegraft.runs.result import RunResult
from treegraft.runs.run import Run
from treegraft.runs.start import Source
from treegraft.settings.objects import Objects
from treegraft.traces.demonstrations import add_lessons

if TYPE_CHECKING:
    from treegraft.policy.learn.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Credited:
    """The trees of an update with their advantages."""

    kept: list[Tree]
    dropped: list[Tree]
    """Those sampled in vain, which are recorded and counted like the rest."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What an update has learned."""

    trees: Credited
    lessons: Given
    metrics: dict[str, float]


def train(
    config: Source = None,
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
    return launched(
        story,
        config,
        command="train",
        recipe=recipe,
        resume=resume,
        accepts_changes=accepts_changes,
        display=display,
        placement=placement,
        callbacks=callbacks,
        **objects,
    )


def sft(config: Source = None, **options: Unpack[LaunchOptions]) -> RunResult:
    """Runs the warm-up alone and returns where the results are; arguments and errors as in
    `train`."""
    return launched(partial(story, only_warms_up=True), config, command="sft", **options)


async def story(
    run: Run,
    ranks: Ranks | None = None,
    placement: Placement | None = None,
    *,
    only_warms_up: bool = False,
) -> RunResult:
    """Returns the result of a whole run; `ranks` learn together, None for this process alone."""
    async with prepared(run, ranks, placement, only_warms_up=only_warms_up) as training:
        if not only_warms_up:
            await make_updates(training)
        elif not run.state.is_closed:
            # So that a later training logs update 0 with its evaluation.
            run.reporter.metrics(run.state.update, run.state.pending)
        return run.result()


async def make_updates(training: Training) -> None:
    """Makes the updates that are left. An interruption before learning begins leaves no trace."""
    async with training.opened():
        await evaluate_and_keep(training.run, training.parts)
        async for number in training.remaining():
            with span("update", update=number, **{"rl.loop.iteration": number}):
                grown = await sample(training, number)
                learned = learn(training, number, credit(training, grown))
                await publish(training, number)
                keep(training, number, grown, learned)
            await evaluate_and_keep(training.run, training.parts)


async def sample(training: Training, number: int) -> Sampled:
    """Returns the scored trees of an update."""
    run, grower, config = training.run, training.grower, training.run.config

    def show(done: int, num_tasks: int) -> None:
        run.display.phase("rollout", done, num_tasks, str(grower.watch))

    work = sample_update(
        *(config, training.sampler, grower, number, run.state.num_drawn),
        size=config.run.tasks_per_update - training.replay.num_due,
        num_at_once=training.parts.num_trees_at_once(config.explore.num_leaves),
        on_progress=show,
    )
    with training.clock("rollout"):
        grown = await run.interruptible(work, waits_on=grower.watch)
        await training.publisher.rest()
        return grown


def credit(training: Training, grown: Sampled) -> Credited:
    """Returns the trees with their advantages, by the settings and the user's own rule."""
    training.run.display.phase("learning", 0, 1)
    parts, config = training.parts, training.run.config
    with training.clock("credit"):
        kept, dropped = (
            credit_by_entropy(parts.learner, trees, config, parts.credit_rule)
            for trees in (grown.kept, grown.dropped)
        )
    return Credited(kept, dropped)


def learn(training: Training, number: int, trees: Credited) -> Learned:
    """Changes the weights; returns the trees with what learning has measured on them."""
    replay, run = training.replay, training.run
    spent = max(run.config.run.spent(run.state.spent).values(), default=0.0)
    with training.clock("learn"):
        lessons = training.lessons(number, trees.kept + trees.dropped)
        mixed = replay.mixed(number, trees.kept)
        kept, metrics = training.parts.learner.learn(mixed, lessons.trees, spent)
        fresh = replay.take_fresh(number, kept)
    return Learned(replace(trees, kept=fresh), lessons, metrics)


async def publish(training: Training, number: int) -> None:
    """Gives the engine the weights of this update."""
    with training.clock("publish"):
        await training.publisher.publish(number)


def keep(training: Training, number: int, grown: Sampled, learned: Learned) -> None:
    """Records the update: its trees, its metrics, and the state that the next one begins with."""
    run, parts, config = training.run, training.parts, training.run.config
    own, every = learned.trees, config.health.symptoms_every
    shown_late: dict[str, float] = {}
    with training.clock("symptoms"):
        if every > 0 and number % every == 0:
            seen = (parts.learner, own.kept, parts.format, parts.toolbox.tools)
            shown_late = symptoms(*seen, has_own_scores=config.loss.old_logprobs == "learner")
    trees, num_drawn = own.kept + own.dropped, run.state.num_drawn + grown.num_drawn
    # After learning, so that traces of this update are never retrieved within it.
    added = training.buffer.grow(trees, number)
    if training.book is not None and training.buffer.origin == "self":
        add_lessons(training.book, added, parts)
    training.sampler.take(number, trees)
    # The one place where the metrics of an update come together.
    metrics = (
        rollout_metrics(trees, grown.references)
        | unused_metrics(trees, parts.explorer, config.explore.num_leaves)
        | grown.metrics
        | learned.metrics
        | learned.lessons.metrics
        | shown_late
        | training.publisher.check(number, learned.metrics.get("learn/engine_gap"))
    )
    # Taken once an update: each call starts counting anew.
    counting = (training.buffer, training.replay, training.sampler, training.clock)
    for part in (parts, training.grower, *counting):
        metrics |= part.take_metrics()
    kept = {"num_drawn": num_drawn, "sampler": training.sampler.state or None}
    state = training.publisher.state() | kept
    state |= {} if training.book is None else {"lesson_value": learned.lessons.value}
    run.record_update(number, trees + grown.references, metrics, state)
