"""The papers' cold start: conversations as ShareGPT has them, whose texts hold the papers' tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.types import Task, ToolCall
from treegraft.settings.policy import WarmupSettings
from treegraft.traces.demonstrations import Chosen, read_demonstrations

PLACES = ("Orla", "Brinn", "Sel", "Tarn", "Ulm", "Vesk", "Wend", "Yar", "Zell", "Arn")


def searched(place: str, number: int) -> str:
    """One search and an answer, in a single turn."""
    return (
        f"<think>I look up the lighthouse of {place}.</think><search>lighthouse of {place}</search>"
        f"<result>Doc 1: The lighthouse of {place} has {number} steps.</result>"
        f"<think>It says {number}.</think>"
        f"<answer>The final answer is \\[ \\boxed{{{number}}} \\]</answer>"
    )


def calculated(place: str, number: int) -> str:
    """A search, a program of several lines and an answer, with white space between the tags."""
    return (
        f"<think>\nFirst the steps.\n</think>\n<search>\nsteps of {place}\n</search>\n"
        f"<result>\n{number} steps\n</result>\n<think>\nNow twice as many.\n</think>\n"
        f"<python>\nsteps = {number}\nprint(2 * steps)\n</python>\n<result>\n{2 * number}"
        f"\n</result>\n<think>\nDone.\n</think>\n<answer>\n\\boxed{{{2 * number}}}\n</answer>"
    )


def row(question: str, *turns: tuple[str, str]) -> dict[str, Any]:
    said = [{"from": "human", "value": question}]
    said += [{"from": role, "value": text} for role, text in turns]
    return {"conversations": said, "system": "You may search and run Python."}


ROWS = [
    *(
        row(f"Steps of {place}?", ("gpt", searched(place, 80 + n)))
        for n, place in enumerate(PLACES)
    ),
    *(row(f"Twice {place}?", ("gpt", calculated(place, 10 + n))) for n, place in enumerate(PLACES)),
]
"""Twenty rows in the shape of ARPO's released cold start."""


def written(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def read(path: Path, **settings: Any) -> Chosen:
    return read_demonstrations(path, WarmupSettings(traces=str(path), **settings), ())


def test_rows_of_the_released_cold_start_are_demonstrations(tmp_path: Path) -> None:
    found = read(written(tmp_path / "sft.jsonl", ROWS))
    assert len(found.demonstrations) == 20 and not found.left_out
    task, steps = found.demonstrations[0]
    assert task == Task(id="line 1", question="Steps of Orla?", reference=())
    assert [(one.thought, one.calls, one.answer) for one in steps] == [
        (
            "I look up the lighthouse of Orla.",
            (ToolCall("search", "lighthouse of Orla"),),
            None,
        ),
        ("It says 80.", (), "80"),
    ]
    assert steps[0].observations[0].text == "Doc 1: The lighthouse of Orla has 80 steps."
    task, steps = found.demonstrations[-1]
    assert [call.name for one in steps for call in one.calls] == ["search", "python"]
    assert steps[1].calls[0].body.strip() == "steps = 19\nprint(2 * steps)"
    assert steps[2].answer == "38"


def test_calls_and_results_in_turns_of_their_own(tmp_path: Path) -> None:
    turns = row(
        "Steps?",
        ("gpt", "<think>Look.</think><search>steps of Orla</search>"),
        ("human", "<result>84</result>"),
        ("gpt", "<answer>84</answer>"),
    )
    ((_, steps),) = read(written(tmp_path / "sft.jsonl", [turns])).demonstrations
    assert steps[0].calls == (ToolCall("search", "steps of Orla"),)
    assert [seen.text for seen in steps[0].observations] == ["84"]
    assert steps[-1].answer == "84"


def test_a_bad_row_of_many_is_counted_and_shown(tmp_path: Path) -> None:
    path = written(tmp_path / "sft.jsonl", [*ROWS, row("And?", ("gpt", "<search>never closed"))])
    found = read(path)
    assert len(found.demonstrations) == 20
    assert "1 cannot be read (line 21: " in found.left_out


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ({"conversations": [{"from": "gpt", "value": "hello"}]}, "the user's question"),
        ({"conversations": [{"value": "hello"}]}, "no 'from'"),
        ({"question": "q"}, "neither messages, conversations, steps nor text"),
        ([], "expected an object"),
    ],
)
def test_above_five_of_a_hundred_the_file_is_refused(bad: Any, part: str, tmp_path: Path) -> None:
    path = written(tmp_path / "sft.jsonl", [*ROWS, bad, bad])
    with raises_code("demonstrations-unfit") as caught:
        read(path)
    said = str(caught.value)
    assert "2 of 22 rows cannot be read (line 21: " in said and part in said
    assert "expected at most 5%" in said
