"""Questions from any reasoning-gym generator, with a scripted expert for those that hold an
arithmetic expression.

Item seeds of training, evaluation and warm-up lie in ranges that cannot meet, and questions that
occur in an earlier part (held-out first) are left out of the later ones.
"""

from __future__ import annotations

import ast
import dataclasses
import decimal
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from treegraft import SettingError, StepContent, Task, math_equal
from treegraft.extras.tasks.plugin import ReasoningGymSettings
from treegraft.parts import Observation, OpenTasks, ToolCall, errors, keyed, packages

_RANGE_SIZE = 1 << 29
"""Item seeds of one purpose; all three ranges stay below 2^31, which every generator accepts."""
_PURPOSES = ("train", "eval", "warmup")
_DRAWS_PER_TASK = 20
"""How many items are looked at for each task wanted, before a small generator counts as
exhausted."""

_PLANS = (
    "I will compute this with python.",
    "Let me calculate it with python.",
    "I can use python for this.",
    "A line of python gives the result.",
    "I let python work it out.",
)
_CONCLUSIONS = (
    "The result is {}.",
    "Python gives {}.",
    "So the answer is {}.",
    "The output is {}.",
    "It comes to {}.",
)

# Without **, since a power of small numbers can fill the memory.
_OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


class ReasoningGym(OpenTasks):
    """Tasks of one reasoning-gym generator."""

    def __init__(
        self, settings: ReasoningGymSettings, *, seed: int, num_train: int, num_eval: int
    ) -> None:
        """Raises SettingError for a generator or a parameter that reasoning-gym does not know or
        refuses."""
        self._settings = settings
        self._seed = seed
        self._num_train = num_train
        self._num_eval = num_eval
        _check_generator(settings)

    def train_tasks(self) -> Sequence[Task]:
        """Returns the training tasks, fewer if the generator has no more
        different questions.

        Raises:
            SettingError: every question of the generator is a held-out one.
        """
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the held-out tasks, fewer if the generator has no more different
        questions."""
        return self._eval

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        """Returns a python call that prints the question's expression, and the answer read off it.

        The wording depends on the seed. None if the question has no expression or its value is
        not the reference.
        """
        expression = task.columns.get("expression")
        program = _program(expression) if isinstance(expression, str) else None
        if program is None:
            return None
        code, result = program
        if not task.reference or not math_equal(result, task.reference):
            return None
        plan = keyed.keyed_choice(_PLANS, "plan", seed, task.id)
        conclusion = keyed.keyed_choice(_CONCLUSIONS, "conclusion", seed, task.id).format(result)
        call = ToolCall("python", code)
        return (
            StepContent(thought=plan, calls=(call,), observations=(Observation(text=result),)),
            StepContent(thought=conclusion, answer=result),
        )

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns tasks that occur neither in training nor in evaluation and that the expert can
        do.

        Fewer than `num` where it cannot do some or the generator has no more; none where there is
        no expert.
        """
        # A few tasks tell: expressions are a matter of the generator, not of the item.
        if all(self.expert(task, seed) is None for task in self._train[:_DRAWS_PER_TASK]):
            return ()
        # Held-out questions must not be imitated.
        seen = {task.question for task in (*self._eval, *self._train)}
        tasks = self._draw("warmup", num, keyed.keyed_int("warmup", seed), seen)
        return tuple(task for task in tasks if self.expert(task, seed) is not None)

    def report(self) -> Sequence[str]:
        """Returns a sentence for each part that has fewer tasks than wanted."""
        parts = (
            ("training", self._train, self._num_train),
            ("held-out", self._eval, self._num_eval),
        )
        found = []
        for name, tasks, wanted in parts:
            if len(tasks) < wanted:
                found.append(
                    f"{self._settings.generator}: {len(tasks)} different {name} questions instead"
                    f" of {wanted}; with these tasks.arithmetic.params the generator has too few"
                )
        return tuple(found)

    @cached_property
    def _eval(self) -> tuple[Task, ...]:
        return self._draw("eval", self._num_eval, 0, set())

    @cached_property
    def _train(self) -> tuple[Task, ...]:
        tasks = self._draw("train", self._num_train, 0, {task.question for task in self._eval})
        if not tasks:
            raise SettingError(
                f"the generator '{self._settings.generator}' has no more different questions than"
                f" the {len(self._eval)} held-out ones; lower tasks.num_eval or widen"
                " tasks.arithmetic.params",
                code="questions-spent",
            )
        return tasks

    def _draw(self, purpose: str, num: int, key: int, seen: set[str]) -> tuple[Task, ...]:
        """Returns up to `num` tasks with questions that are new; adds them to `seen`."""
        generator = self._settings.generator
        size = _DRAWS_PER_TASK * num + 100
        # Item i of a reasoning-gym data set has seed base + i: the bases must lie apart, or parts
        # share items.
        offset = keyed.keyed_int("items", self._seed, purpose, key) % (_RANGE_SIZE - size)
        base = _PURPOSES.index(purpose) * _RANGE_SIZE + offset
        data = _create(self._settings, seed=base, size=size)
        tasks: list[Task] = []
        for index in range(size):
            if len(tasks) == num:
                break
            # Some generators set the precision of the thread's decimal arithmetic.
            with decimal.localcontext():
                item: Mapping[str, Any] = data[index]
            question = str(item["question"])
            answer = item.get("answer")
            # Small generators repeat themselves; a question in two parts would leak.
            if question in seen:
                continue
            seen.add(question)
            expression = find_expression(question, item.get("metadata") or {})
            tasks.append(
                Task(
                    id=f"{generator}/{purpose}/{len(tasks)}",
                    question=question,
                    reference=() if answer is None else (str(answer),),
                    category=generator,
                    columns={"generator": generator, "expression": expression},
                )
            )
        return tuple(tasks)


def find_expression(question: str, metadata: Mapping[str, Any]) -> str | None:
    """Returns the arithmetic expression of a reasoning-gym item; None if its question has
    none.

    An expression that only the metadata have (countdown's solution) is not the one that the
    question is about.
    """
    last_line = "".join(question.splitlines()[-1:]).removesuffix("?").strip().removesuffix("=")
    candidates = (metadata.get("expression"), metadata.get("problem"), last_line)
    shown = "".join(question.split())
    for candidate in candidates:
        if isinstance(candidate, str) and "".join(candidate.split()) in shown:
            expression = candidate.strip()
            if _program(expression) is not None:
                return expression
    return None


def _program(expression: str) -> tuple[str, str] | None:
    """Returns the code that prints the expression's value, and its output; None where it is no
    arithmetic.

    Divisions of integers come out even in reasoning-gym and are written //, so that no digit is
    lost; decimals are rounded to the places their sum can have, products and quotients to ten.
    """
    exact = expression if "." in expression or "//" in expression else expression.replace("/", "//")
    try:
        tree = ast.parse(exact, mode="eval").body
        value = _value(tree)
    except (SyntaxError, ValueError, ArithmeticError, TypeError, RecursionError, MemoryError):
        return None
    if isinstance(tree, ast.Constant):
        return None  # a number alone, with nothing to compute
    if isinstance(value, float):
        # Binary floats print 0.1 + 0.2 as 0.30000000000000004.
        decimals = map(len, re.findall(r"\.(\d*)", expression))
        places = 10 if re.search(r"[*/]", expression) else max(decimals)
        return f"print(round({exact}, {places}))", str(round(value, places))
    return f"print({exact})", str(value)


def _value(node: ast.AST) -> int | float:
    """Returns the value of an arithmetic expression as Python computes it. Raises ValueError for
    any other syntax."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]  # the line above is the check
    if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.operand))  # type: ignore[no-any-return]  # numbers give numbers
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))  # type: ignore[no-any-return]  # as above
    raise ValueError(f"{type(node).__name__} is not arithmetic")


def _create(settings: ReasoningGymSettings, *, seed: int, size: int) -> Any:
    from reasoning_gym.factory import create_dataset

    return create_dataset(settings.generator, seed=seed, size=size, **settings.params)


def _check_generator(settings: ReasoningGymSettings) -> None:
    packages.require("tasks.kind = 'arithmetic'", "reasoning_gym")
    from reasoning_gym.factory import DATASETS

    name = settings.generator
    if name not in DATASETS:
        raise SettingError(
            f"tasks.arithmetic.generator is '{name}', which reasoning-gym does not"
            f" have.{errors.nearest(name, DATASETS)} It has {len(DATASETS)}, e.g. chain_sum,"
            " basic_arithmetic, products",
            code="unknown-generator",
        )
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
    for param in settings.params:
        if param in ("seed", "size"):
            raise SettingError(
                f"tasks.arithmetic.params sets '{param}'; use run.seed, tasks.num_train and"
                " tasks.num_eval",
                code="generator-own-setting",
            )
        if param not in known:
            raise SettingError(
                f"tasks.arithmetic.params has '{param}', which the generator '{name}' does not"
                f" have.{errors.nearest(param, known)} It has {', '.join(sorted(known))}",
                code="unknown-parameter",
            )
    try:
        with decimal.localcontext():
            _create(settings, seed=0, size=1)[0]
    # reasoning-gym checks by assert, and generators raise any exception.
    except Exception as error:
        raise SettingError(
            f"the generator '{name}' refuses tasks.arithmetic.params {settings.params}: {error}",
            code="generator-refuses",
        ) from error


def arithmetic_tasks(settings: Any, seed: int) -> ReasoningGym:
    """Returns the tasks of the table [tasks]."""
    return ReasoningGym(
        settings.arithmetic, seed=seed, num_train=settings.num_train, num_eval=settings.num_eval
    )
