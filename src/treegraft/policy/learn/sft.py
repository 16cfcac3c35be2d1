"""Warm-up: supervised fine-tuning on traces, with a dial for how willing the agent is to go on.

A demonstration is a tree of one path, so it goes through the same packing and the same scores as
reinforcement learning. Loss falls on the agent's own tokens; the token that decides between going
on and answering can be left out (skill without propensity) or shown with a chosen frequency
(propensity without touching skill).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from treegraft.core.demonstration import Demonstration, Show, Written, solution, tree_of_paths
from treegraft.core.errors import DataError
from treegraft.core.interfaces import Format, Rewriting, Span, TaskSource
from treegraft.core.keyed import keyed_int, keyed_unit
from treegraft.core.types import Origin, StepContent, Task, Tree
from treegraft.policy.learn.optimiser import decay
from treegraft.settings.policy import WarmupSettings

FINAL_LR_FRACS = {"constant": 1.0, "linear": 0.05, "cosine": 0.0}
"""Share of the peak rate at the end of a warm-up; "cosine" as in the cold start of Tool-Star."""
NUM_CHECKED = 1000
"""Traces of a file that are rendered before work starts, to find a misfit early; the others are
when their turn comes."""
MOST_UNFIT = 0.05
"""Share of a file's rows that may be left out as unfit; with more, the file is another than was
meant."""


class Demonstrations:
    """Yields the batch of each warm-up step, a function of seed and step alone."""

    def __init__(
        self,
        source: TaskSource,
        format: Format,
        settings: WarmupSettings,
        seed: int,
        show: Show | None = None,
        stored: Sequence[Demonstration] | None = None,
    ) -> None:
        """Checks the demonstrations.

        Args:
            show: makes the expert's calls in environments, so that demonstrations hold what
                rollouts hold; None where the tasks have no environment.
            stored: at least one, of a file or a buffer; None for those of the expert.

        Raises:
            DataError: the tasks have no expert, or the format cannot write more than MOST_UNFIT of
                the stored demonstrations.
        """
        self._source = source
        self._format = format
        self._settings = settings
        self._seed = seed
        self._show = show
        self._shown: dict[int, list[Demonstration]] = {}
        """Of the step that was prepared last, as environments showed them."""
        self._stored = stored
        self.left_out = ""
        """How many of the stored ones that were looked at the format cannot write, and why."""
        self._orders: dict[int, list[int]] = {}
        """Of the stored demonstrations, by pass."""
        if stored is not None:
            # Spread over the whole file: a misfit is often in its later part.
            spread = stored[:: max(1, len(stored) // NUM_CHECKED)]
            unfit = list(filter(None, map(self._misfit, spread)))
            if unfit:
                reason = few_unfit(settings.traces, unfit, len(spread), "cannot be written")
                self.left_out = f"{len(unfit)} of {len(spread)} {reason}"
        elif not self._made(0, 1):
            fault = (
                "these tasks have no scripted expert; name a JSONL file of"
                ' {"question": ..., "steps": [...]} instead'
            )
            if any(solution(source, task, 0) for task in source.train_tasks()[:1]):
                fault = (
                    "warmup_tasks() of the tasks returns none that expert() solves; return tasks"
                    " there that are neither trained nor evaluated on"
                )
            raise DataError(f'warmup.traces is "expert", but {fault}', code="expert-missing")

    async def prepare(self, step: int) -> None:
        """Makes the calls of a step's demonstrations in environments, where the tasks have one, so
        that `batch` returns them as they are there. Raises `DataError` for one that its environment
        contradicts."""
        if self._show is None or self._stored is not None:
            return
        made = self._made(step, self._settings.batch_size)
        self._shown = {step: await self._show(made)}

    def _made(self, step: int, num: int) -> list[Demonstration]:
        found = []
        for task in self._source.warmup_tasks(num, keyed_int(self._seed, "warmup", step)):
            # By the task's id, not by the step: the expert solves a task in the same way each time.
            steps = solution(self._source, task, keyed_int(self._seed, "expert", task.id))
            if steps:
                found.append((task, steps))
        return found

    def batch(self, step: int) -> list[Tree]:
        """Returns the demonstrations of warm-up step `step` as trees of one path."""
        size = self._settings.batch_size
        if self._stored is None:
            chosen = self._shown.get(step) or self._made(step, size)
        else:
            places = range(step * size, (step + 1) * size)
            chosen = [self._stored[self._place(place)] for place in places]
        trees: list[Tree] = []
        fault: DataError | None = None
        for task, steps in chosen:
            try:
                trees.append(self._demonstrate(task, steps, (step, len(trees))))
            except DataError as error:
                # A stored one that was not looked at is left out when its turn comes.
                if self._stored is None:
                    raise
                fault = error
        if fault is not None and not trees:
            raise fault
        return trees

    def _misfit(self, one: Demonstration) -> str:
        """Which demonstration the format cannot write, and why; empty where it can."""
        try:
            demonstration_tree(self._format, *one)
        except ValueError as error:
            return f"{one[0].id}: {str(error).splitlines()[0]}"
        return ""

    def _place(self, position: int) -> int:
        """The stored demonstration at a position of the passes over them, each shuffled by a key of
        its own."""
        assert self._stored is not None
        epoch, place = divmod(position, len(self._stored))
        if epoch not in self._orders:
            # By key alone, so that a resumed warm-up draws the same ones.
            order = sorted(
                range(len(self._stored)), key=lambda n: keyed_int(self._seed, "trace", epoch, n)
            )
            # Places come in order, so the pass before is no longer needed.
            self._orders = {epoch: order}
        return self._orders[epoch][place]

    def _demonstrate(
        self, task: Task, steps: tuple[StepContent, ...], key: tuple[int, int]
    ) -> Tree:
        """The demonstration as a tree; keyed coins say whether it decides, is cut short and
        contains grafts."""
        frac = self._settings.decision_frac
        try:
            # With a share of 0, decisions are learned like all other tokens. Else a demonstration
            # shows decisions, and answers as early as continue_prob says, or has them masked: the
            # expert's own decisions would teach the expert's willingness.
            masks_decisions = frac > 0.0 and keyed_unit(self._seed, "kind", *key) >= frac
            if frac > 0.0 and not masks_decisions:
                steps = self._shortened(task, steps, key)
            grafts = self._grafts(len(steps), key)
            return demonstration_tree(
                self._format, task, steps, masks_decisions=masks_decisions, grafts=grafts
            )
        except DataError:
            raise
        except ValueError as error:
            where = "expert, task" if self._stored is None else f"'{self._settings.traces}',"
            raise DataError(
                f"warmup.traces {where} {task.id}: {error} Correct it or leave it out.",
                code="demonstration-invalid",
            ) from error

    def _grafts(self, num_steps: int, key: tuple[int, int]) -> frozenset[int]:
        """Which steps become grafts."""
        chosen: set[int] = set()
        # Never the first one nor two in a row: each graft follows a step of the agent's own. And
        # never the last one, which answers.
        for index in range(1, num_steps - 1):
            coin = keyed_unit(self._seed, "graft", *key, index)
            if index - 1 not in chosen and coin < self._settings.graft_prob:
                chosen.add(index)
        return frozenset(chosen)

    def _shortened(
        self, task: Task, steps: tuple[StepContent, ...], key: tuple[int, int]
    ) -> tuple[StepContent, ...]:
        """The demonstration cut where a keyed coin says to answer too early."""
        probabilities = self._settings.continue_prob
        for count in range(1, len(steps) - 1):
            # The last one is that of all later steps.
            goes_on = probabilities[min(count, len(probabilities)) - 1]
            early = self._source.early_answer(task, steps[:count])
            if early is not None and keyed_unit(self._seed, "decision", *key, count) >= goes_on:
                return (*steps[:count], StepContent(thought=steps[-1].thought, answer=early))
        return steps


def few_unfit(path: object, unfit: Sequence[str], num: int, what: str) -> str:
    """Returns in words why rows were left out, with three examples.

    Args:
        unfit: a line for each row that was left out.
        num: all rows.
        what: the verb, such as "cannot be read".

    Raises:
        DataError: they are more than MOST_UNFIT of the rows.
    """
    reason = f"{what} ({'; '.join(unfit[:3])}{'; ...' if len(unfit) > 3 else ''})"
    if len(unfit) > MOST_UNFIT * num:
        raise DataError(
            f"warmup.traces '{path}': {len(unfit)} of {num} rows {reason}; expected at most"
            f" {MOST_UNFIT:.0%}. Correct them or leave them out.",
            code="demonstrations-unfit",
        )
    return reason


def demonstration_tree(
    format: Format,
    task: Task,
    steps: Sequence[StepContent],
    *,
    masks_decisions: bool = False,
    grafts: Collection[int] = frozenset(),
) -> Tree:
    """Returns a tree of one path with loss on the agent's own tokens.

    Args:
        masks_decisions: leave out, in each step after a result, the token in which going on and
            answering differ.
        grafts: indices of steps that become retrieved ones, without loss.
    """
    path = []
    for index, content in enumerate(steps):
        # Without loss, since the text is another agent's; it is there so that the policy has seen
        # such steps before the first update grafts some.
        if index in grafts:
            path.append(Written(content, [(format.render_graft([content]), Origin.RETRIEVED)]))
            continue
        masked = _decision_token(format, steps, index) if masks_decisions and index else None
        spans = format.render_step(content)
        context: Sequence[Span] = ()
        if content.observations and isinstance(format, Rewriting) and format.drops_thoughts:
            context = format.context_spans(spans[0][0], content.observations)
            spans = spans[:1]
        origins = [origin for ids, origin in spans for _ in ids]
        has_loss = (origin is Origin.POLICY and n != masked for n, origin in enumerate(origins))
        path.append(Written(content, spans, tuple(has_loss), context))
    return tree_of_paths(task, f"warmup/{task.id}", format.prompt_ids(task), [path])


def _decision_token(format: Format, steps: Sequence[StepContent], index: int) -> int | None:
    """Index in the step's tokens of the first one that differs between going on and answering."""
    content = steps[index]
    # The other choice at this place, in the words of this very demonstration where it has any.
    if content.answer is None:
        other = StepContent(thought=steps[-1].thought, answer="1")
    else:
        before = next((step for step in steps[:index] if step.calls), content)
        other = StepContent(thought=before.thought, calls=before.calls)
    ours, _ = format.render_step(content)[0]
    theirs, _ = format.render_step(other)[0]
    for n, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return n
    return None


def learning_rate(settings: WarmupSettings, step: int) -> float:
    """Returns the rate of step 0, 1, ...: a linear rise, then by `schedule` to its share of the
    peak."""
    rise = settings.lr_warmup_steps
    if step < rise:
        return settings.lr * (step + 1) / rise
    left = (settings.num_steps - step) / max(1, settings.num_steps - rise)
    return settings.lr * decay(settings.schedule, left, FINAL_LR_FRACS[settings.schedule])
