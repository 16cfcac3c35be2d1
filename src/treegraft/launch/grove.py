"""Trees for a loop of one's own: all of a recipe that grows, scores and credits them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, cast

from treegraft.assemble import Parts, assemble, build_own_learner, training_explorer
from treegraft.core.errors import SettingError, first_cause
from treegraft.core.files import write_atomically
from treegraft.core.given import GivenObjects, giving
from treegraft.core.interfaces import (
    CreditRule,
    Engine,
    Explorer,
    Retriever,
    Tokenizer,
    WeightSource,
)
from treegraft.core.types import Task, Tree
from treegraft.rollout.loop import Grower
from treegraft.rollout.measure import rollout_metrics, unused_metrics
from treegraft.runs.checkpoint import TrainState
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees
from treegraft.settings.config import Config
from treegraft.settings.load import config_json
from treegraft.settings.objects import Objects, with_objects
from treegraft.settings.packages import missing_packages
from treegraft.settings.table import with_choices
from treegraft.traces.rollout_buffer import RolloutBuffer

if TYPE_CHECKING:
    from treegraft.policy.learn.learner import Learner
    from treegraft.policy.learn.lessons import LessonBook

Result = TypeVar("Result")
Weights = WeightSource | Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Of a policy: those of a learner, or tensors by name."""


def grove(
    recipe_or_config: Config | Mapping[str, Any] | str | Path,
    *,
    engine: Engine | None = None,
    retriever: Retriever | None = None,
    **objects: Unpack[Objects],
) -> Grove:
    """Returns a `Grove`, which grows trees by a recipe, for `with` or `async with`.

        with grove("demo") as my_grove:
            for number in range(1, 11):
                trees = my_grove.grow(my_grove.tasks[:4], number)

    Args:
        recipe_or_config: a recipe's path or name, tables of settings, or a `Config`. Of [run],
            seed, num_threads and, with a learn.schedule that falls, num_updates count; [warmup],
            [replay], [sampler], [eval] and [checkpoint] are `train`'s.
        engine: one of your own, which stays yours to close; None makes the recipe's, and closes it.
        retriever: finds the steps that are grafted, where the buffer is in another process; None
            opens the recipe's buffer here.
        objects: Python objects in place of settings, as of `train`.

    Raises:
        SettingError: a wrong setting or object, a package that the recipe needs and is missing, or
            an engine without the methods of `Engine`.
    """
    config, given = with_objects(recipe_or_config, objects)
    if engine is not None and not isinstance(engine, Engine):
        raise SettingError(
            f"engine: got a {type(engine).__name__}, expected an object with the methods of"
            " treegraft.parts.Engine, or None for the engine of the recipe.",
            code="engine-invalid",
        )
    if missing := missing_packages(config):
        raise SettingError("\n".join(missing.values()), code="packages-missing")
    config = with_choices(config)
    return Grove(config, given, engine, retriever)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """What lives as long as a grove is open."""

    parts: Parts
    buffer: RolloutBuffer | None
    """None where a retriever was given."""
    explorer: Explorer
    grower: Grower
    rule: CreditRule | None
    book: LessonBook | None
    loop: asyncio.AbstractEventLoop
    thread: int
    """Of the loop."""


@asynccontextmanager
async def _held(
    config: Config, engine: Engine | None, retriever: Retriever | None
) -> AsyncIterator[_Held]:
    """Holds the parts that a recipe asks for."""
    from treegraft.policy.learn.credit import find_credit_rule

    rule = find_credit_rule(config)
    async with assemble(config, engine=engine) as parts:
        parts.check_tasks(parts.train_tasks)
        await parts.try_environment()
        await parts.try_rewards(parts.train_tasks)
        explorer = training_explorer(config, parts.tokenizer)
        async with AsyncExitStack() as stack:
            buffer = book = None
            if retriever is None:
                buffer = RolloutBuffer(config, parts.source)
                await buffer.check_expert(parts.environments)
                await stack.enter_async_context(buffer.opened(0, parts))
                retriever = buffer.retriever
                if config.loss.lesson_coef and buffer.buffer is not None:
                    from treegraft.traces.demonstrations import book_of

                    book = book_of(config, buffer.buffer, buffer.origin, parts)
            yield _Held(
                parts=parts,
                buffer=buffer,
                explorer=explorer,
                grower=parts.grower(explorer, retriever=retriever),
                rule=rule,
                book=book,
                loop=asyncio.get_running_loop(),
                thread=threading.get_ident(),
            )


class Grove:
    """Trees for tasks, as `train` grows, scores and credits them; made by `grove`.

    With `async with` it uses the running event loop. With `with` it has a thread with its own
    event loop, so it works in notebooks too. It writes no file unless `save` is called; its
    Step-Trace Buffer lives in memory.
    """

    def __init__(self, config: Config, given: GivenObjects, *own: Any) -> None:
        """Keeps the settings and the objects that they lead to; the parts are made at the beginning
        of the block.

        Args: own: engine and retriever, None for the recipe's.
        """
        self.config, self._given, self._own = config, given, own
        self._now: _Held | None = None
        self._value, self._earlier = (0.0, 0.0), list[str]()
        self._closing: Future[None] = Future()
        self._ended: Future[None] = Future()

    # ------------------------------------------------------------------ begin and end

    def _refuse_open(self) -> None:
        if self._now is not None:
            raise SettingError(
                "grove: it is open already; make another one with grove(...).", code="grove-open"
            )

    async def __aenter__(self) -> Self:
        self._refuse_open()
        self._holding = _held(self.config, *self._own)
        with first_cause(), giving(self._given):
            self._now = await self._holding.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._now = None
        # Another block begins with an engine of the first weights.
        vars(self).pop("learner", None)
        self._value, self._earlier = (0.0, 0.0), []
        await self._holding.__aexit__(*error)

    def __enter__(self) -> Self:
        self._refuse_open()
        opened: Future[None] = Future()
        self._closing, self._ended = Future(), Future()

        async def live() -> None:
            async with self:
                opened.set_result(None)
                await asyncio.wrap_future(self._closing)

        def run() -> None:
            try:
                asyncio.run(live())
                self._ended.set_result(None)
            except BaseException as error:  # handed over to the caller, whatever it is
                (self._ended if opened.done() else opened).set_exception(error)

        threading.Thread(target=run, name="treegraft-grove", daemon=True).start()
        try:
            opened.result()
        except BaseException:
            # After Ctrl-C the thread closes what it is about to open.
            self._closing.set_result(None)
            raise
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.set_result(None)
        self._ended.result()

    def _open(self) -> _Held:
        if self._now is None:
            raise SettingError(
                "grove: it is not open; use it inside `with grove(...) as my_grove:`, or"
                " `async with`.",
                code="grove-not-open",
            )
        return self._now

    def _wait(self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any) -> Result:
        """The result of work on the grove's loop, waited for in another thread."""
        now = self._open()
        if now.thread == threading.get_ident():
            raise SettingError(
                "grove: this one lives on the event loop that runs here; await agrow and apublish,"
                " or open it with `with`.",
                code="grove-on-this-loop",
            )
        future = asyncio.run_coroutine_threadsafe(work(*given), now.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def arun(self, work: Callable[..., Coroutine[Any, Any, Result]], *given: Any) -> Result:
        """Returns the result of `work(*given)` on the event loop that this grove lives on, awaited
        on any other; its parts belong to that one."""
        now = self._open()
        if now.thread == threading.get_ident():
            return await work(*given)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(*given), now.loop))

    # ------------------------------------------------------------------ trees

    @property
    def tasks(self) -> Sequence[Task]:
        """The training tasks."""
        return self._open().parts.train_tasks

    @property
    def parts(self) -> Parts:
        """The other parts of the recipe: held-out tasks, format, tools, scorer."""
        return self._open().parts

    @property
    def retriever(self) -> Retriever | None:
        """What finds the steps that are grafted; None where none are."""
        return self._open().grower.retriever

    @property
    def tokenizer(self) -> Tokenizer:
        """That of the model, with the recipe's template."""
        return cast(Tokenizer, self._open().parts.tokenizer)

    @property
    def engine(self) -> Engine:
        """What samples."""
        return self._open().parts.engine

    def grow(self, tasks: Sequence[Task], number: int) -> list[Tree]:
        """Returns one tree for each task, in their order: scored, with advantages and weights.

        A tree is a function of the settings, the weights, the task and `number` (and of a buffer
        that grows), equal to that of `train` in its update of this number.

        Args:
            tasks: of `tasks`, or of your own; each once.
            number: of the update, from 0 on.

        Raises:
            SettingError: a task twice, or no number.
            DataError: a task whose prompt cannot be made.
            EngineError: the engine has died, or every trajectory failed for a reason of ours.
        """
        return self._wait(self._grown, tasks, number)

    async def agrow(self, tasks: Sequence[Task], number: int) -> list[Tree]:
        """Returns the same as `grow`, awaited."""
        return await self.arun(self._grown, tasks, number)

    async def _grown(self, tasks: Sequence[Task], number: int) -> list[Tree]:
        from treegraft.policy.learn.credit import credit_by_entropy, credit_trees

        now, config = self._open(), self.config
        _check_order(tasks, number)
        known = {id(task) for task in now.parts.train_tasks}
        now.parts.check_tasks([task for task in tasks if id(task) not in known])
        with first_cause():
            trees = await now.grower.grow_all(
                tasks,
                noise_key=(config.run.seed, "train", number),
                group_prefix=str(number),
                max_live_trees=min(
                    config.rollout.max_live_trees,
                    now.parts.num_trees_at_once(config.explore.num_leaves),
                ),
            )
        with giving(self._given):
            if "learner" in vars(self):
                return credit_by_entropy(self.learner, trees, config, now.rule)
            return credit_trees(trees, config, now.rule)

    def remember(self, trees: Sequence[Tree], number: int) -> None:
        """Adds the best trajectories of an update to the buffer, by [buffer.grow]; none if
        buffer.grow.num_best is 0. Call it after learning, so that no tree retrieves its own
        steps."""
        now = self._open()
        if now.buffer is None:
            return
        added = now.buffer.grow(trees, number)
        if now.book is not None and now.buffer.origin == "self":
            from treegraft.traces.demonstrations import add_lessons

            add_lessons(now.book, added, now.parts)

    def lessons(self, trees: Sequence[Tree], number: int) -> list[Tree]:
        """Returns the lessons of an update for `Learner.learn`: stored successes, each with its
        weight as the advantage of its leaf. The list is empty if loss.lesson_coef is 0. Call it
        once for each update, in order, since lessons of earlier updates' tasks are drawn too."""
        now = self._open()
        if now.book is None:
            return []
        given = now.book.choose(trees, self._earlier, number, self._value)
        self._value = given.value
        self._earlier += [tree.task.id for tree in trees]
        return given.trees

    def take_metrics(self, trees: Sequence[Tree]) -> dict[str, float]:
        """Returns the metrics of an update's trees, and those of tools, engine and retrieval since
        the last call, by the names of metrics.jsonl."""
        now = self._open()
        found = rollout_metrics(trees)
        found |= unused_metrics(trees, now.explorer, self.config.explore.num_leaves)
        for part in (now.parts, now.grower, now.buffer):
            found |= {} if part is None else part.take_metrics()
        return found

    def record(
        self,
        folder: Path | str,
        trees: Sequence[Tree],
        number: int,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Writes an update's trees into a folder that `treegraft view` shows, and a line of
        metrics, None for none; what the folder has of this update and of later ones gives way."""
        place = RunFolder(Path(folder))
        place.cut_before(number)
        write_atomically(place.path / "config.json", config_json(self.config))
        if trees:
            write_trees(place.trees_path(number), trees)
        if metrics is not None:
            place.append_metrics(number, metrics)

    # ------------------------------------------------------------------ weights

    @cached_property
    def learner(self) -> Learner:
        """A `Learner` as a training's at its beginning, made when first asked for; its weights are
        its own, so publish them after learning. Once there is one, `grow` has it score the
        entropies around grafts where the engine knows its top-k ones alone.

        Raises:
            SettingError: learn.schedule falls, and run.num_updates does not say when it ends.
        """
        schedule = self.config.learn.schedule
        if schedule != "constant" and "num_updates" not in self.config.run.model_fields_set:
            raise SettingError(
                f"learn.schedule: got '{schedule}' without run.num_updates, expected the number of"
                " updates of this loop, over which the learning rate falls. Set run.num_updates, or"
                ' learn.schedule = "constant".',
                code="schedule-without-end",
            )
        with giving(self._given):
            learner = build_own_learner(self._open().parts)
        if self.config.loss.kl_coef:
            learner.freeze_reference()
        return learner

    def publish(self, weights: Weights | None, version: int) -> None:
        """Gives the engine weights, which later trees are sampled with.

        Args:
            weights: `Learner.weights()`, a transformers or peft model (whose adapters are merged),
                or tensors by name: all of the plain model's; None where somebody else has given an
                engine over a server its weights.
            version: noted in each step that they sample; 0 is the engine's first.

        Raises:
            EngineError: names are missing or unknown; the engine then keeps its weights.
            DriftError: the engine holds other weights afterwards.
        """
        self._wait(self._published, weights, version)

    async def apublish(self, weights: Weights | None, version: int) -> None:
        """Does the same as `publish`, awaited."""
        await self.arun(self._published, weights, version)

    async def _published(self, weights: Any, version: int) -> None:
        from treegraft.policy.publish import hand_over
        from treegraft.policy.weights import ModelWeights, named_weights

        if weights is None and self.engine.fingerprint:
            raise SettingError(
                "publish: got no weights, expected some: this engine holds its own. None is for"
                ' publish.kind = "external" and for a ServerEngine.',
                code="publish-without-weights",
            )
        if weights is not None and not hasattr(weights, "fingerprint"):
            named = dict(named_weights(weights) if hasattr(weights, "state_dict") else weights)
            weights = ModelWeights({name: tensor.detach() for name, tensor in named.items()})
        await hand_over(self.engine, cast(WeightSource, weights), version)

    def save(self, folder: Path | str, number: int) -> None:
        """Writes a checkpoint of `learner`, all of it or nothing: a folder that transformers loads
        and the commands and `evaluate_checkpoint` take. To go on from it, `Learner.load` it in a
        grove of the same settings and publish the learner's weights.

        Args:
            number: of the update.
        """
        from treegraft.policy.checkpoint import save_checkpoint

        save_checkpoint(
            Path(folder),
            learner=self.learner,
            tokenizer=self.tokenizer,
            state=replace(TrainState.fresh(), update=number, is_closed=True),
            config_json=config_json(self.config),
            keep_adapter=not self.config.model.lora.merge,
        )


def _check_order(tasks: Sequence[Any], number: Any) -> None:
    """Refuses what no trees can be grown for."""
    if not isinstance(number, int) or number < 0:
        raise SettingError(
            f"grow: got number {number!r}, expected the number of the update, 0 or more.",
            code="update-number-invalid",
        )
    for task in tasks:
        if not isinstance(task, Task):
            raise SettingError(
                f"grow: got a {type(task).__name__} among the tasks, expected treegraft.Task.",
                code="no-task",
            )
    ids = [task.id for task in tasks]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise SettingError(
            f"grow: task '{twice}' is given twice and would have the same tree twice; grow it again"
            " with another number.",
            code="task-twice",
        )
