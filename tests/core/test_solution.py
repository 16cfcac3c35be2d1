"""What an expert or a foreign method gives by mistake is an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.demonstration import solution
from treegraft.core.types import StepContent, Task, ToolCall
from treegraft.tasks.open import OpenTasks

TASK = Task(id="maze/0", question="go ?", reference=())


class Expert(OpenTasks):
    def __init__(self, steps: Any) -> None:
        self.steps = steps

    def train_tasks(self) -> list[Task]:
        return [TASK]

    eval_tasks = train_tasks

    def expert(self, task: Task, seed: int) -> Any:
        if isinstance(self.steps, Exception):
            raise self.steps
        return self.steps


@pytest.mark.parametrize(
    ("steps", "code"),
    [
        (KeyError("gem"), "expert-raised"),
        (7, "expert-raised"),
        (["go north"], "expert-step-invalid"),
        ([StepContent(calls=(ToolCall("go", {"x": 1}),))], "expert-step-invalid"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_expert_is_named(steps: Any, code: str) -> None:
    with raises_code(code) as caught:
        solution(Expert(steps), TASK, 0)
    assert "task 'maze/0'" in str(caught.value)


def test_a_list_of_steps_is_taken() -> None:
    answer = StepContent(answer="done")
    assert solution(Expert([answer]), TASK, 0) == (answer,)
    assert solution(Expert(None), TASK, 0) is None
