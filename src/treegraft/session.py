"""A session: everything of a recipe that samples, scores, learns and measures, for `train` and for
loops of one's own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from treegraft.assemble import Parts, adapted
from treegraft.core.clock import Clock
from treegraft.core.errors import DataError, SettingError, first_cause
from treegraft.core.files import write_atomically
from treegraft.core.given import GIVEN, GivenObjects, Record, giving, present
from treegraft.core.interfaces import (
    Display,
    Engine,
    LearnerLike,
    Retriever,
    Tokenizer,
    WeightSource,
)
from treegraft.core.interrupt import Stop
from treegraft.core.looped import Life
from treegraft.core.registry import registered
from treegraft.core.team import Alone, Team
from treegraft.core.types import Task, Tree
from treegraft.evals.evaluate import Evaluation, evaluate
from treegraft.evals.preflight import Preflight
from treegraft.explore.build import build_explorer
from treegraft.policy.learn.measuring import measuring
from treegraft.policy.publish import Publisher
from treegraft.rollout.loop import Placement, Watch
from treegraft.rollout.measure import rollout_metrics, unused_metrics
from treegraft.rollout.rounds import Trees, sample_update
from treegraft.runs.checkpoint import TrainState, read_state
from treegraft.runs.display import NoDisplay
from treegraft.runs.open import find_checkpoint
from treegraft.runs.record import RunFolder
from treegraft.runs.replay import Replay
from treegraft.runs.run import WarmUpStep
from treegraft.runs.tree_files import write_trees
from treegraft.settings.config import Config
from treegraft.settings.load import config_json
from treegraft.settings.objects import Objects, with_objects
from treegraft.settings.packages import missing_packages
from treegraft.settings.table import value_of, with_choices
from treegraft.tasks.build import build_tasks, tasks_checksum
from treegraft.tasks.sampler import build_sampler
from treegraft.traces.demonstrations import add_lessons, lesson_book, read_demonstrations
from treegraft.traces.rollout_buffer import OWN_FILE, RolloutBuffer

if TYPE_CHECKING:
    from treegraft.policy.learn.learner import Learner
    from treegraft.policy.learn.lessons import LessonBook
    from treegraft.policy.learn.ranks import Ranks
    from treegraft.policy.learn.sft import Demonstrations

Result = TypeVar("Result")
Weights = WeightSource | Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Of a policy: those of a learner, or tensors by name."""
SAVED = Path("treegraft")
"""The folder in a checkpoint of a session without a run folder that has what a run keeps in its
own: the buffer, the reference of the KL term, and the trees of the groups that it replays."""
REFERENCE = Path("reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a run gives to its session."""

    state: TrainState
    """Of the checkpoint to go on from, or a fresh one."""
    folder: Path | None = None
    """Of the run, for the buffer and the reference; None keeps the one in memory and the other in
    checkpoints."""
    display: Display = field(default_factory=NoDisplay)
    stop: Stop = field(default_factory=Stop)
    """Asks for the end of `sample` and `evaluate`."""
    team: Team = field(default_factory=Alone)
    """The processes that run the training together."""
    placement: Placement | None = None
    """Where engines and growers stand; None for this process."""
    warms_up_only: bool = False
    """Leaves out what only updates need."""


class Session:
    """A recipe at work: trees for tasks, credit, learning, evaluation, checkpoints.

        with Session("demo") as session:
            for update in range(session.update + 1, 11):
                trees = session.sample(update)
                trees = session.credit(trees)
                trees = session.learn(trees, update)
                session.sync_weights(update)
                print(session.pop_metrics()["reward/mean"])
            session.save("agent")

    `Session("demo", checkpoint="agent")` goes on from there as if nothing had happened. With `with`
    a session has a thread with its own event loop, so it works in notebooks too; with `async with`
    it uses the running loop, and the methods that wait are awaited: `asample`, `async_weights`,
    `aevaluate`. It writes no file unless `save` or `record` is called; its Step-Trace Buffer lives
    in memory.
    """

    def __init__(
        self,
        recipe: Config | Mapping[str, Any] | str | Path,
        *,
        checkpoint: Path | str | None = None,
        engine: Engine | None = None,
        retriever: Retriever | None = None,
        learns: bool = True,
        within: Surroundings | None = None,
        **objects: Unpack[Objects],
    ) -> None:
        """Reads the settings; everything else is made at the beginning of the block.

        Args:
            recipe: a recipe's path or name, tables of settings, or a `Config`.
            checkpoint: a folder that `save` or `train` wrote, to go on from; None begins anew.
            engine: one of your own, which stays yours to close; None makes the recipe's.
            retriever: finds the steps that are grafted, if the buffer is in another process; None
                opens the recipe's buffer here.
            learns: False for a loop whose learner is another one: no weights to train are loaded
                before `learner` is asked for.
            within: what a run gives to its session; None for a loop of one's own.
            objects: Python objects in place of settings, as of `train`.

        Raises:
            SettingError: a wrong setting or object, a package that the recipe needs and is missing,
                or an engine without the methods of `Engine`.
            CheckpointError: no such checkpoint.
        """
        # A run has named its objects already.
        given = GivenObjects()
        if isinstance(recipe, Config) and not objects:
            config = recipe
        else:
            config, given = with_objects(recipe, objects)
        if engine is not None and not isinstance(engine, Engine):
            raise SettingError(
                f"engine: got a {type(engine).__name__}, expected an object with the methods of"
                " treegraft.parts.Engine, or None for the engine of the recipe.",
                code="engine-invalid",
            )
        if missing := missing_packages(config):
            raise SettingError("\n".join(missing.values()), code="packages-missing")
        self.config = with_choices(config)
        self._given = present().joined(given)
        self._checkpoint = None if checkpoint is None else find_checkpoint(checkpoint)
        self._engine = engine
        self._retriever = retriever
        self._learns = learns
        self._is_own = within is None
        if within is None:
            within = Surroundings(
                state=read_state(self._checkpoint) if self._checkpoint else TrainState.fresh()
            )
        self._within = within
        self._life = Life("session")
        self._grads = ExitStack()
        self._set_back()

    def _refuse_endless(self) -> None:
        """Refuses a learning rate that falls, where nobody says over how many updates."""
        schedule = self.config.learn.schedule
        if schedule != "constant" and "num_updates" not in self.config.run.model_fields_set:
            raise SettingError(
                f"learn.schedule: got '{schedule}' without run.num_updates, expected the number of"
                " updates of this loop, over which the learning rate falls. Set run.num_updates, or"
                ' learn.schedule = "constant".',
                code="schedule-without-end",
            )

    def _set_back(self) -> None:
        """Puts all that updates change back to the state that the session begins with."""
        state = self._within.state
        self.update = state.update
        """The update whose weights the learner has, 0 before the first."""
        self.num_warm_up_steps = state.warmup_steps
        """Warm-up steps done."""
        self._warms_up = False
        self._num_drawn = self._num_drawn_before = state.num_drawn
        self._own_drawn = [*state.own_drawn]
        """Tasks of earlier updates that no sampler has drawn."""
        self._lesson_value = state.lesson_value
        self._is_ready = False
        self.is_syncing = False
        """Whether the engine is being given weights, or that has failed. Other processes of the run
        then wait to hand over their parts, and would take no part in a checkpoint."""
        self._learner: LearnerLike | None = None
        self._last = Trees()
        self._learned: dict[str, float] = {}
        self._lesson_metrics: dict[str, float] = {}
        self.clock = Clock()

    # ------------------------------------------------------------------ begin and end

    def __enter__(self) -> Self:
        self._refuse_open()
        with giving(self._given), first_cause():
            self._life.begin(self._held())
            try:
                return self._opened()
            except BaseException:
                self._life.end()
                raise

    def __exit__(self, *_: object) -> None:
        self._grads.close()
        self._life.end()
        self._set_back()

    async def __aenter__(self) -> Self:
        self._refuse_open()
        with giving(self._given), first_cause():
            await self._life.begin_here(self._held())
            try:
                return self._opened()
            except BaseException:
                await self._life.end_here(None, None, None)
                raise

    async def __aexit__(self, *error: Any) -> None:
        self._grads.close()
        await self._life.end_here(*error)
        self._set_back()

    def _refuse_open(self) -> None:
        if self._life.is_open:
            raise SettingError(
                "session: it is open already; make another one with Session(...).",
                code="session-open",
            )

    def _opened(self) -> Self:
        """Makes the learner, in the thread that uses it."""
        if self._learns:
            from treegraft.policy.load import limit_threads, with_gradients

            self._grads.enter_context(with_gradients())
            limit_threads(self.config.run.num_threads)
            self._learner = self._made_learner()
        return self

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[None]:
        """Holds everything that lives on the event loop."""
        config = self.config
        within = self._within
        within.display.phase("loading", 0, 0, f"{config.model.path}, {config.tasks.kind}")
        # Before the model: wrong tasks are told at once, not after minutes of loading.
        source = build_tasks(config.tasks, config.run.seed)
        if config.run.num_updates and not within.warms_up_only and not source.train_tasks():
            raise DataError(
                "the training tasks are empty; expected at least one row. See tasks.num_train and"
                " [tasks.dataset].",
                code="train-tasks-empty",
            )
        opening = Parts.build(
            config,
            needs="learner" if self._learns else "engine",
            # Adapters are restored with the optimiser's state, onto the model that they adapt.
            model_path=None if config.model.lora.rank else self._checkpoint,
            source=source,
            engine=self._engine,
            placement=within.placement,
            num_ranks=within.team.size if self._learns else 0,
        )
        async with opening as parts, AsyncExitStack() as stack:
            self.parts = parts
            self._stack = stack
            await self._prepare(parts)
            if self._is_own and not self._learns:
                await self._make_ready()
            yield

    async def _prepare(self, parts: Parts) -> None:
        """Makes and checks what updates need, before anything is written."""
        from treegraft.policy.learn.credit import find_credit

        config = self.config
        within = self._within
        self._credit = find_credit(config)
        parts.check_tasks([*parts.train_tasks, *parts.eval_tasks])
        self._tasks_checksum = tasks_checksum(parts.train_tasks, parts.eval_tasks)
        await parts.try_environment()
        # One that returns no numbers would end the run after its warm-up and first rollouts.
        await parts.try_rewards(parts.train_tasks)
        self.sampler = build_sampler(config.sampler, parts.train_tasks, config.run.seed)
        self.sampler.restore(within.state.sampler or {})
        # ARPO divides changes of entropy by the vocabulary's size, or its logarithm.
        self.explorer = build_explorer(
            config.explore, vocab_size=len(parts.tokenizer), penalty=config.reward.penalty
        )
        self.buffer: RolloutBuffer | None = None
        """The Step-Trace Buffer; None if a retriever was given."""
        self._book: LessonBook | None = None
        self._demonstrations: Demonstrations | None = None
        self._imitated: tuple[Path, str] | None = None
        """Place and checksum of stored demonstrations."""
        if self._retriever is not None:
            return
        self.buffer = buffer = self._made_buffer(parts)
        if self._is_warm_up_left:
            await self._read_demonstrations(buffer)
        if not within.warms_up_only:
            # Before the warm-up: a buffer without successes is bad input.
            self._book = lesson_book(config, buffer, parts)

    def _made_buffer(self, parts: Parts) -> RolloutBuffer:
        saved = self._saved(OWN_FILE) if self._within.folder is None else None
        return RolloutBuffer(self.config, parts.source, self._within.folder, saved=saved)

    def _saved(self, name: Path) -> Path | None:
        """What belongs to the checkpoint to go on from: in it, or in the folder of the run that
        wrote it; None if there is nothing of that name."""
        checkpoint = self._checkpoint
        if checkpoint is None:
            return None
        places = [checkpoint / SAVED / name]
        above = checkpoint.absolute().parent
        if above.name == "checkpoints":
            places.append(above.parent / name)
        return next((place for place in places if place.exists()), None)

    @property
    def _is_warm_up_left(self) -> bool:
        # A loop of one's own asks for a warm-up by calling it.
        is_wanted = self._warms_up or not self._is_own
        return is_wanted and self.num_warm_up_steps < self.config.warmup.num_steps

    @property
    def _needs_buffer(self) -> bool:
        if self.buffer is None:
            return False
        warms_up = self._is_warm_up_left and "warmup" in self.buffer.readers
        return warms_up or not self._within.warms_up_only

    async def _read_demonstrations(self, buffer: RolloutBuffer) -> None:
        """Reads what the remaining warm-up steps imitate, unless their buffer is not made yet."""
        from treegraft.policy.learn.sft import Demonstrations

        config = self.config
        parts = self.parts
        stored = None
        if config.warmup.traces != "expert":
            path = Path(os.path.expandvars(config.warmup.traces)).expanduser()
            if "warmup" in buffer.readers:
                if buffer.is_due and not buffer.file.exists():
                    return
                path = buffer.file
            has_environment = bool(config.environment.kind)
            chosen = read_demonstrations(
                path, config.warmup, parts.train_tasks, has_environment=has_environment
            )
            stored = chosen.demonstrations
            self._imitated = (path, chosen.checksum())
            num_passes = config.warmup.num_steps * config.warmup.batch_size / len(stored)
            left_out = f"; left out: {chosen.left_out}" if chosen.left_out else ""
            self._within.display.note(
                f"the warm-up makes {num_passes:.3g} passes over {len(stored)} trajectories of"
                f" '{path}'{left_out}"
            )
        found = Demonstrations(
            parts.source, parts.format, config.warmup, config.run.seed, parts.show, stored
        )
        if found.left_out:
            self._within.display.warn(f"warmup.traces: {found.left_out}; these are not imitated")
        await found.prepare(self.num_warm_up_steps)
        self._demonstrations = found

    def settle(self, folder: Path) -> None:
        """Takes the folder of its run, now that it is there; makes the buffer, and shows what the
        user should know before any work."""
        if self.buffer is not None:
            self.buffer.folder = folder
        self._within = replace(self._within, folder=folder)
        self.parts.keep_logs(folder / "servers")
        self._wait(self._settled)

    async def _settled(self) -> None:
        display = self._within.display
        parts = self.parts
        for text in parts.notes:
            display.note(text)
        for name in registered("choice"):
            if (chosen := value_of(self.config, name)) != "auto":
                display.note(f"{name} = {chosen!r}")
        if self._checkpoint is None:
            for one in await Preflight(parts).findings():
                if one.is_doubtful or not one.is_good:
                    display.warn(str(one))
        await self._build_buffer()

    async def _build_buffer(self) -> None:
        """Makes the run's copy of the buffer. Before the warm-up: an expert whose steps earn
        nothing shows here."""
        if self.buffer is not None and self.buffer.is_due and self._needs_buffer:
            self._within.display.phase("buffer", 0, 1, self.config.buffer.path)
            await self.buffer.build(self.parts)
            if self._book is None and not self._within.warms_up_only:
                self._book = lesson_book(self.config, self.buffer, self.parts)

    def begin_updates(self) -> None:
        """Gives the engine the weights, freezes the reference and opens the buffer, once the
        warm-up is done. A loop with one process need not call it."""
        with self._syncing():
            self._wait(self._make_ready)

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        self.is_syncing = True
        yield
        # Not after an error: the engine has what it has then.
        self.is_syncing = False

    async def _make_ready(self) -> None:
        if self._is_ready:
            return
        parts = self.parts
        config = self.config
        state = self._within.state
        if self._learns and self._learner is not None:
            # Also after a resume: the engine of this process does not know its version yet.
            await self._publisher.publish(self.update)
            self._keep_reference(self._learner)
        # Counts of demonstrations belong to no update.
        parts.toolbox.take_metrics()
        retriever = self._retriever
        if self.buffer is not None:
            await self._stack.enter_async_context(self.buffer.opened(state.update, parts))
            retriever = self.buffer.retriever
            if self._book is None or self.buffer.origin == "self":
                # What later updates had added is gone only now.
                self._book = lesson_book(config, self.buffer, parts)
        self._replay = Replay(config, self._replayed_folder(), state.update)
        # Last, since what it retrieves from is open only now.
        self.grower = parts.grower(self.explorer, retriever=retriever)
        self._is_ready = True

    def _replayed_folder(self) -> RunFolder | None:
        """The folder with the trees of earlier updates."""
        if self._within.folder is not None:
            return RunFolder(self._within.folder)
        trees = self._saved(Path("trees"))
        return None if trees is None else RunFolder(trees.parent)

    # ------------------------------------------------------------------ waiting

    def _wait(
        self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any, stops: bool = False
    ) -> Result:
        """The result of work on the session's loop, waited for in another thread.

        Args:
            stops: whether a stop that is asked for ends the work.
        """
        self._refuse_closed()
        watch = Watch()
        within = self._within
        self._watch = watch
        with giving(self._given), first_cause(), self._life.working(work, *given) as future:
            if not stops:
                return future.result()
            return within.stop.wait(future, waits_on=watch, on_heartbeat=within.display.warn)

    async def arun(self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any) -> Result:
        """Returns the result of `work(*given)` on the event loop that this session lives on,
        awaited on any other; its parts belong to that one."""
        self._refuse_closed()
        self._watch = Watch()
        with giving(self._given), first_cause():
            return await self._life.run(work, *given)

    def _refuse_closed(self) -> None:
        if not self._life.is_open:
            raise SettingError(
                "session: it is not open; use it inside `with Session(...) as session:`, or"
                " `async with`.",
                code="session-not-open",
            )

    def _refuse_unready(self) -> None:
        self._refuse_closed()
        if not self._is_ready:
            raise SettingError(
                "session: nothing was sampled yet; call `sample`, or `begin_updates`, first.",
                code="session-not-begun",
            )

    # ------------------------------------------------------------------ parts

    @property
    def tasks(self) -> Sequence[Task]:
        """The training tasks."""
        self._refuse_closed()
        return self.parts.train_tasks

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the model, with the recipe's template."""
        self._refuse_closed()
        return cast(Tokenizer, self.parts.tokenizer)

    @property
    def engine(self) -> Engine:
        """What samples."""
        self._refuse_closed()
        return self.parts.engine

    @property
    def retriever(self) -> Retriever | None:
        """What finds the steps that are grafted; None if none are."""
        self._refuse_unready()
        return self.grower.retriever

    @property
    def learner(self) -> Learner:
        """The `Learner` that owns the trained weights."""
        self._refuse_closed()
        if self._learner is None:
            with giving(self._given):
                self._learner = self._made_learner()
        return cast("Learner", self._learner)

    def _made_learner(self) -> LearnerLike:
        """The learner, with the weights and the optimiser's state of the checkpoint."""
        if self._is_own:
            self._refuse_endless()
        config = self.config
        parts = self.parts
        team = self._within.team
        model = parts.model
        parts.model = None
        if model is None:
            model = adapted(config, parts.load_model())
        learner: LearnerLike
        if team.size > 1:
            from treegraft.policy.learn.sharded import build_learner

            learner = build_learner(cast("Ranks", team), config, model, self._checkpoint)
        else:
            from treegraft.policy.learn.learner import Learner

            learner = Learner(
                model,
                config.learn,
                config.loss,
                length_constant=config.rollout.max_completion_tokens,
                num_updates=config.run.num_updates,
            )
            if self._checkpoint is not None:
                learner.load(self._checkpoint)
        self._publisher = Publisher(
            parts.engine, learner, config.model.dtype, self._within.state, team
        )
        if not self._learns:
            self._keep_reference(learner)
        return learner

    def _keep_reference(self, learner: LearnerLike) -> None:
        """Freezes the reference of the KL term: the policy before the first update, also after a
        resume."""
        team = self._within.team
        if not self.config.loss.kl_coef:
            team.share(None)
            return
        is_new = self.update == 0
        place = self._reference_place()
        team.share((str(place.resolve()) if place else "", is_new))
        learner.keep_reference(place, is_new=is_new)

    def _reference_place(self) -> Path | None:
        """Where the reference is kept; None for memory alone."""
        folder = self._within.folder
        if folder is not None:
            return folder / REFERENCE
        if self._checkpoint is None or self.update == 0:
            return None
        # Reading says what is missing if there is none.
        return self._saved(REFERENCE) or self._checkpoint / SAVED / REFERENCE

    # ------------------------------------------------------------------ the warm-up

    def warm_up(self) -> Iterator[WarmUpStep]:
        """Yields after each step of imitation that is left by [warmup]; nothing if it is done or
        none is asked for. Call it before the first `sample`.

        Raises:
            DataError: demonstrations that cannot be imitated.
        """
        from treegraft.policy.learn.sft import learning_rate

        self._warms_up = True
        if not self._is_warm_up_left:
            self._within.team.share(None)
            return
        settings = self.config.warmup
        learner = self.learner
        if self._demonstrations is None and self.buffer is not None:
            # Not read yet, or of a buffer that has been made meanwhile.
            self._wait(self._read_demonstrations, self.buffer)
        if (demonstrations := self._demonstrations) is None:
            raise SettingError(
                f"warmup.traces: got '{self.config.warmup.traces}' with a buffer that is made in"
                " memory; expected a file. Make it with `treegraft buffer build`, and name it.",
                settings=["warmup.traces"],
                code="demonstrations-in-memory",
            )
        team = self._within.team
        for step in range(self.num_warm_up_steps, settings.num_steps):
            began = time.monotonic()
            cpu_began = time.process_time()
            self._wait(demonstrations.prepare, step)
            # Every rank takes the same rate and the same trees, in this order (follower.py).
            rate = team.share(learning_rate(settings, step))
            trees = team.share_trees(demonstrations.batch(step))
            loss = learner.imitate(trees, rate, settings.weight_decay)
            spent = {
                "warmup/num_loss_tokens": float(
                    sum(one.num_loss_tokens for tree in trees for one in tree.steps)
                ),
                "warmup/num_skipped_steps": float(math.isnan(loss)),
                "time/warmup_s": time.monotonic() - began,
                "time/warmup_cpu_s": time.process_time() - cpu_began,
            }
            self.num_warm_up_steps = step + 1
            if team.share(step + 1 == settings.num_steps):
                # AdamW's moments of imitation would go on pushing in its direction in the first
                # updates.
                learner.forget_moments()
            yield WarmUpStep(num_steps=step + 1, metrics={"warmup/loss": loss}, spent=spent)
        team.share(None)

    # ------------------------------------------------------------------ one update

    def sample(self, update: int, tasks: Sequence[Task] | None = None) -> Trees:
        """Returns the scored trees of an update.

        A tree is a function of the settings, the weights, the task and `update` (and of a buffer
        that grows).

        Args:
            update: its number, from 1 on.
            tasks: of `tasks` or of your own, each once, for one tree each in their order; None for
                those that the recipe's sampler draws, with further ones in place of groups that
                teach nothing if the recipe asks for that.

        Raises:
            SettingError: a task twice, or no task.
            DataError: a task whose prompt cannot be made.
            EngineError: the engine has died, or every trajectory failed for a reason of ours.
        """
        # Not while the engine takes weights: nothing may stop that halfway.
        self.begin_updates()
        return self._wait(self._sampled, update, tasks, stops=True)

    async def asample(self, update: int, tasks: Sequence[Task] | None = None) -> Trees:
        """Returns the same as `sample`, awaited."""
        return await self.arun(self._sampled, update, tasks)

    async def _sampled(self, update: int, tasks: Sequence[Task] | None) -> Trees:
        await self._make_ready()
        self.clock = Clock()
        self.grower.watch = self._watch
        with self.clock("rollout"):
            trees = await self._grown(update, tasks)
        # Earlier tasks alone are lessons: those of this update have trees of their own.
        self._num_drawn_before = self._num_drawn
        self._num_drawn += trees.num_drawn
        self._last = trees
        return trees

    async def _grown(self, update: int, tasks: Sequence[Task] | None) -> Trees:
        config = self.config
        parts = self.parts
        at_once = parts.num_trees_at_once(config.explore.num_leaves)
        if tasks is None:
            return await sample_update(
                config,
                self.sampler,
                self.grower,
                update,
                self._num_drawn,
                size=config.run.tasks_per_update - self._replay.num_due,
                num_at_once=at_once,
                on_progress=self._show_rollout,
            )
        _check_tasks(tasks)
        known = {id(task) for task in parts.train_tasks}
        parts.check_tasks([task for task in tasks if id(task) not in known])
        return Trees(
            await self.grower.grow_all(
                tasks,
                noise_key=(config.run.seed, "train", update),
                group_prefix=str(update),
                max_live_trees=min(config.rollout.max_live_trees, at_once),
            )
        )

    def _show_rollout(self, done: int, num_tasks: int) -> None:
        self._within.display.phase("rollout", done, num_tasks, str(self._watch))

    def credit(self, trees: Sequence[Tree]) -> Trees:
        """Returns the trees with advantages and weights, by [credit] and the recipe's own rule.

        Raises:
            SettingError: the rule failed, or returned something other than its tree.
        """
        from treegraft.policy.learn.credit import credit_by_entropy, credit_trees

        config = self.config
        how = self._credit
        own = Trees.of(trees)
        self._within.display.phase("learning", 0, 1)
        with self.clock("credit"), giving(self._given):
            # An engine may know top-k entropies alone, which a learner makes exact.
            if self._learner is not None:
                with measuring(self._learner, self._within.team) as scorer:
                    kept = credit_by_entropy(scorer, own, config, how)
                    dropped = credit_by_entropy(scorer, own.dropped, config, how)
            else:
                kept, dropped = (credit_trees(some, config, how) for some in (own, own.dropped))
        self._last = own.changed(kept, dropped)
        return self._last

    def learn(self, trees: Sequence[Tree], update: int, budget_used: float = 0.0) -> Trees:
        """Changes the weights, with replayed groups and stored successes beside the trees if the
        recipe asks for them, and remembers the best trajectories by [buffer.grow].

        Returns the trees with old log-probabilities and ratios; metrics go to `pop_metrics`.

        Args:
            trees: credited.
            update: their number.
            budget_used: share of the run's limit of calls or tokens, for a schedule.
        """
        own = Trees.of(trees)
        with self.clock("learn"), giving(self._given):
            chosen = self.lessons(own.sampled, update)
            # By the update's number, so that a resumed run replays the same groups.
            mixed = self._replay.mixed(update, own)
            team = self._within.team
            self.update = update
            team.share(budget_used)
            mixed = team.share_trees(mixed)
            chosen = team.share_trees(chosen)
            kept, self._learned = self.learner.learn(mixed, chosen, budget_used)
            own = own.changed(self._replay.take_fresh(update, kept))
        self._last = own
        self.remember(own.sampled, update)
        return own

    def lessons(self, trees: Sequence[Tree], update: int) -> list[Tree]:
        """Returns the stored successes that `Learner.learn` imitates beside the trees of an update,
        each with its weight as the advantage of its leaf; none if loss.lesson_coef is 0. `learn`
        calls it; call it once for each update, in order, in a loop with another learner."""
        self._lesson_metrics = {}
        if self._book is None:
            return []
        earlier = [*self.sampler.drawn(self._num_drawn_before), *self._own_drawn]
        chosen = self._book.choose(trees, earlier, update, self._lesson_value or (0.0, 0.0))
        if self._num_drawn == self._num_drawn_before:
            self._own_drawn += [tree.task.id for tree in trees]
        self._lesson_value = chosen.value
        self._lesson_metrics = chosen.metrics
        return chosen.trees

    def remember(self, trees: Sequence[Tree], update: int) -> None:
        """Adds the best trajectories of an update to the buffer, by [buffer.grow], and tells the
        sampler of tasks how hard they were. `learn` calls it; in a loop with another learner, call
        it after learning, so that no tree retrieves its own steps."""
        if self.buffer is not None:
            added = self.buffer.grow(trees, update)
            if self._book is not None and self.buffer.origin == "self":
                add_lessons(self._book, added, self.parts)
        # Also without a buffer: the sampler of tasks learns from how hard they were.
        self.sampler.take(update, trees)

    # ------------------------------------------------------------------ weights

    def sync_weights(self, version: int, weights: Weights | None = None) -> None:
        """Gives the engine weights, which later trees are sampled with.

        Args:
            version: noted in each step that they sample; 0 is the engine's first.
            weights: None for those of `learner`, or for none if somebody else has given them to an
                engine over a server; else a transformers or peft model (whose adapters are merged),
                or tensors by name: all of the plain model's.

        Raises:
            EngineError: names are missing or unknown; the engine then keeps its weights.
            DriftError: the engine holds other weights afterwards.
        """
        with self.clock("publish"), self._syncing():
            self._wait(self._synced, version, weights)

    async def async_weights(self, version: int, weights: Weights | None = None) -> None:
        """Does the same as `sync_weights`, awaited."""
        await self.arun(self._synced, version, weights)

    async def _synced(self, version: int, weights: Any) -> None:
        if weights is None and self._learns:
            # A loop with a step of its own has no `learn` to say so.
            self.update = version
            await self._publisher.publish(version)
            # Law 7: the engine has to give the learner's log-probabilities within this gap.
            gap = self._learned.get("learn/engine_gap")
            self._learned |= self._publisher.check(version, gap)
        else:
            await self._handed(version, weights)

    async def _handed(self, version: int, weights: Any) -> None:
        """Gives the engine weights of somebody else."""
        from treegraft.policy.publish import hand_over
        from treegraft.policy.weights import ModelWeights, named_weights

        if weights is None and self.engine.fingerprint:
            raise SettingError(
                "sync_weights: got no weights, expected some: this engine holds its own, and this"
                " session has no learner. None is for a ServerEngine.",
                code="publish-without-weights",
            )
        if weights is not None and not hasattr(weights, "fingerprint"):
            named = dict(named_weights(weights) if hasattr(weights, "state_dict") else weights)
            weights = ModelWeights({name: tensor.detach() for name, tensor in named.items()})
        # Waits for completions under way: one version writes a whole completion (law 15).
        await hand_over(self.engine, cast(WeightSource, weights), version)

    # ------------------------------------------------------------------ measuring

    def evaluate(self) -> Evaluation | None:
        """Returns the evaluation, on the held-out tasks by [eval], of the policy that the engine
        has; None without such tasks."""
        self._refuse_closed()
        if not self.parts.eval_tasks:
            return None
        return self._wait(self._evaluated, stops=True)

    async def aevaluate(self) -> Evaluation | None:
        """Returns the same as `evaluate`, awaited."""
        return await self.arun(self._evaluated) if self.parts.eval_tasks else None

    async def _evaluated(self) -> Evaluation:
        display = self._within.display
        found = await evaluate(
            self.parts,
            self.parts.eval_tasks,
            self.update,
            watch=self._watch,
            on_progress=lambda *progress: display.phase("evaluation", *progress),
        )
        # Counts of the evaluation belong to no update.
        self.parts.take_metrics()
        return found

    def pop_metrics(self, trees: Sequence[Tree] | None = None) -> dict[str, float]:
        """Returns the metrics of the last update by the names of metrics.jsonl, and those of tools,
        engine, retrieval and time since the last call.

        Args:
            trees: of another learner's update, without times; None for those of `learn`.

        Raises:
            SettingError: nothing was sampled yet.
        """
        self._refuse_unready()
        own = Trees.of(self._last if trees is None else trees)
        config = self.config
        found = {
            **rollout_metrics(own.sampled, own.references),
            **unused_metrics(own.sampled, self.explorer, config.explore.num_leaves),
            **own.metrics,
            **self._learned,
            **self._lesson_metrics,
        }
        counting: list[Any] = [self.parts, self.grower, self.buffer, self._replay, self.sampler]
        for part in counting:
            # Each call starts counting anew.
            found |= {} if part is None else part.take_metrics()
        if trees is None:
            found |= self.clock.take_metrics()
        self._learned = {}
        self._lesson_metrics = {}
        return found

    def record(
        self,
        folder: Path | str,
        trees: Sequence[Tree],
        update: int,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Writes an update's trees into a folder that `treegraft view` shows, and a line of
        metrics, None for none; what the folder has of this update and of later ones gives way."""
        place = RunFolder(Path(folder))
        # A trainer that resumed repeats updates; two lines of one would be shown twice.
        place.cut_before(update)
        write_atomically(place.path / "config.json", config_json(self.config))
        if trees:
            write_trees(place.trees_path(update), trees)
        if metrics is not None:
            place.append_metrics(update, metrics)

    # ------------------------------------------------------------------ checkpoints

    def state(self) -> dict[str, Any]:
        """Returns the fields of `TrainState` that updates change."""
        found: dict[str, Any] = {
            "num_drawn": self._num_drawn,
            "own_drawn": tuple(self._own_drawn),
            "sampler": self.sampler.state or None,
        }
        if self._learner is not None:
            # The first gap and its breaches, by which the check of the weights judges later ones.
            found |= self._publisher.state()
        if self._book is not None:
            found["lesson_value"] = self._lesson_value
        return found

    def inputs(self, *, at_start: bool = False) -> dict[str, str]:
        """Returns the checksums of what the session reads and a resume depends on, by name: tasks,
        Python objects, the demonstrations of a warm-up that is not done, and the buffer.

        Args:
            at_start: before the buffer is opened, as it was at the checkpoint.
        """
        found = {"tasks": self._tasks_checksum}
        for record in self._local_objects:
            found[record.name] = record.checksum
        if self._imitated is not None and self._is_warm_up_left:
            found["demonstrations"] = self._imitated[1]
        if self.buffer is not None:
            update = self._within.state.update
            of_buffer = self.buffer.checksum_before(update) if at_start else self.buffer.checksums()
            found |= of_buffer
        return found

    @property
    def _local_objects(self) -> list[Record]:
        """The Python objects without an import path, whose source no recipe tells."""
        return [one for one in self._given.records if one.name.startswith(GIVEN)]

    def input_places(self) -> dict[str, str]:
        """Returns what messages call them."""
        found = {"tasks": "the set of tasks"}
        for record in self._local_objects:
            found[record.name] = f"'{record.qualified}' ({record.argument}=)"
        if self._imitated is not None:
            found["demonstrations"] = f"the file of demonstrations '{self._imitated[0]}'"
        if self.buffer is not None:
            file = self.buffer.file
            found["buffer"] = f"the Step-Trace Buffer '{file}' (traces or vectors)"
        return found

    def replayed(self) -> Sequence[str]:
        """Returns the parts of the run's trees that a resume reads again."""
        return self._replay.labels() if self._is_ready else ()

    def save(self, folder: Path | str, state: TrainState | None = None) -> None:
        """Writes a checkpoint, all of it or nothing: a folder that transformers loads, that the
        commands and `evaluate_checkpoint` take, and that `Session(..., checkpoint=folder)` goes on
        from.

        Args:
            state: of the run that the session belongs to; None for a loop of one's own.
        """
        from treegraft.policy.checkpoint import partial_of, save_checkpoint

        if self._is_own and self.update and not self._is_ready:
            # What the checkpoint to go on from has beside the weights is taken up first.
            self._wait(self._make_ready)
        if state is None:
            fresh = replace(TrainState.fresh(), is_closed=self.update > 0, update=self.update)
            state = replace(fresh, warmup_steps=self.num_warm_up_steps, **self.state())
        # Where the other ranks write their part.
        self._within.team.share(str(partial_of(Path(folder)).resolve()))
        save_checkpoint(
            Path(folder),
            learner=self.learner,
            tokenizer=self.parts.tokenizer,
            state=state,
            config_json=config_json(self.config),
            write_more=self._save_more if self._is_own else None,
        )

    def _save_more(self, folder: Path) -> None:
        """Writes what a run keeps in its folder: the buffer that is this session's own, and the
        reference."""
        held = self.buffer
        if held is not None and held.buffer is not None and held.is_own:
            held.buffer.copy_to(folder / SAVED / OWN_FILE)
        reference = self.learner.reference
        if reference is not None:
            reference.save(folder / SAVED / REFERENCE)
        if self._is_ready:
            self._replay.save(RunFolder(folder / SAVED))


def _check_tasks(tasks: Sequence[Any]) -> None:
    """Refuses what no trees can be grown for."""
    for task in tasks:
        if not isinstance(task, Task):
            raise SettingError(
                f"sample: got a {type(task).__name__} among the tasks, expected treegraft.Task.",
                code="no-task",
            )
    ids = [task.id for task in tasks]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise SettingError(
            f"sample: task '{twice}' is given twice and would have the same tree twice; grow it"
            " again with another number.",
            code="task-twice",
        )
