"""Displays and transcripts, rendered to recorded consoles."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console
from tests.support.tiny import tiny
from tests.support.viewed import write_run
from typer.testing import CliRunner

from treegraft.cli.main import app
from treegraft.core.interfaces import Display
from treegraft.core.text import plain
from treegraft.core.types import (
    ContinuationCause,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    Task,
    ToolCall,
    Tree,
)
from treegraft.runs.display import (
    NoDisplay,
    PlainDisplay,
    display_on,
    evaluation_line,
    shown,
)
from treegraft.runs.transcript import pick_sample, transcript
from treegraft.traces.buffer import TraceBuffer

METRICS = {
    "reward/mean": 0.5,
    "rollout/accuracy": 0.25,
    "rollout/tool_calls_mean": 1.5,
    "learn/entropy": 0.123,
    "time/update_s": 2.0,
}


def policy_step(name: str, content: StepContent, violation: str | None = None) -> Step:
    return Step(
        id=name,
        parent=name.rpartition(".")[0],
        depth=name.count("."),
        token_ids=(7, 8),
        origins=(Origin.POLICY, Origin.POLICY),
        loss_mask=(True, True),
        sampling_logprobs=(-0.5, -0.5),
        entropies=(0.1, 0.1),
        content=content,
        violation=violation,
        cause=StartCause() if name.count(".") == 1 else ContinuationCause(),
    )


def example_tree(thought: str = "look it up", result: str = "r2 of e9 is e41") -> Tree:
    """A search and an answer (leaf 0), and a step that broke the format (leaf 1)."""
    search = StepContent(
        thought=thought,
        calls=(ToolCall("search", "r2 of e9"),),
        observations=(Observation(text=result, is_truncated=True),),
    )
    root = Step(
        id="0",
        parent=None,
        depth=0,
        token_ids=(1,),
        origins=(Origin.PROMPT,),
        loss_mask=(False,),
        sampling_logprobs=(0.0,),
        entropies=(0.0,),
    )
    return Tree(
        task=Task(id="t", question="r2 of e9 ?", reference=("e41",)),
        group_id="1/t",
        steps=(
            root,
            policy_step("0.0", search),
            policy_step("0.0.0", StepContent(answer="e41")),
            policy_step("0.1", StepContent(), violation="no thought"),
        ),
        leaves=(
            Leaf(
                step_id="0.0.0", status=Status.COMPLETED, reward=1.0, is_correct=True, advantage=0.7
            ),
            Leaf(step_id="0.1", status=Status.FORMAT_VIOLATION, reward=-1.0, is_correct=False),
        ),
    )


def rendered(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), record=True, width=width, force_terminal=True)
    console.print(renderable)
    return console.export_text()


class Words:
    chat_template = None
    eos_token_id = None

    def decode(self, token_ids: object, **kwargs: object) -> str:
        return f"<think> {token_ids}"


def test_transcript_tells_each_step() -> None:
    text = rendered(transcript(example_tree().trajectories()[0]))
    for part in (
        "r2 of e9 ?",
        "step 1",
        "look it up",
        "search",
        "r2 of e9 is e41",
        "[cut]",
        "step 2",
        "e41",
    ):
        assert part in text
    assert "completed, reward 1, correct, advantage +0.70" in text
    assert "expected" not in text


def test_transcript_of_a_violation_shows_what_was_written() -> None:
    trajectory = example_tree().trajectories()[1]
    assert "2 tokens" not in rendered(transcript(trajectory))
    text = rendered(transcript(trajectory, Words()))  # type: ignore[arg-type]
    assert (
        "no thought" in text
        and "<think> [7, 8]" in text
        and "format violation, reward -1, wrong, expected e41" in text
    )


def test_foreign_text_is_neither_markup_nor_control() -> None:
    nasty = (
        "[bold red]hi[/bold red] [/] [link=x] \x1b[31mred\x1b[0m \x07\r\u202egnorw \x9b2J"
        " :smile: ${}"
    )
    text = rendered(
        transcript(example_tree(thought=nasty, result=nasty).trajectories()[0]), width=200
    )
    assert text.count("[bold red]hi[/bold red] [/] [link=x]") == 2 and ":smile:" in text
    assert not set("\x1b\x07\r\u202e\x9b") & set(text)
    assert plain("a\x1b\tb\n") == "a\u241b\tb\n"
    assert plain("abcdef", 4) == "abcd … (2 more characters)"


@pytest.mark.parametrize("width", [20, 40, 80])
def test_a_transcript_fits_the_width(width: int) -> None:
    tree = example_tree(thought="x" * 500 + " word" * 50, result="長い" * 100)
    text = rendered(transcript(tree.trajectories()[0]), width=width)
    assert all(cell_len(line) <= width for line in text.splitlines())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_below_the_lines() -> None:
    file = Terminal()
    with display_on(file) as display:
        display.started(Path("runs/demo"), "tiny on search_world", 20)
        for done in range(3):
            display.phase("rollout", done, 5, "[red]waiting[/red] \x1b[31m" + "for long " * 20)
        display.warn("careful [bold]now")
        display.phase("learning", 0, 0)
        display.update(1, 20, METRICS)
    display.close()
    text = file.getvalue()
    assert "rollout 0/5: [red]waiting[/red] ␛[31mfor" in text and "…" in text
    assert "warning: careful [bold]now" in text and "update 1/20  reward 0.500" in text
    # The cursor is hidden below a bar, and shown again.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_plain_display_writes_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("treegraft.runs.display.time.monotonic", lambda: now[0])
    file = io.StringIO()
    display: Display = PlainDisplay(file)
    display.started(Path("runs/demo"), "tiny on search_world", 20)
    display.phase("rollout", 1, 10)
    now[0] = 11.0
    display.phase("rollout", 2, 10, "task t waits for search")
    display.phase("rollout", 3, 10)
    display.sample(example_tree())
    display.update(1, 20, METRICS)
    display.update(2, 20, METRICS)
    display.evaluated("update 1", {"eval/accuracy": 0.5, "learn/loss": 2.0})
    display.warn("two\x1b[2J")
    display.interrupted("treegraft train r.toml --resume runs/demo")
    display.finished(Path("runs/demo"), Path("c"), {})
    display.close()
    assert [line.rstrip() for line in file.getvalue().splitlines()] == [
        "run runs/demo: tiny on search_world, 20 updates",
        "  rollout 2/10: task t waits for search",
        "update 1/20  reward 0.500  correct 25%  calls 1.50  entropy 0.123  time 2.0s",
        "    question  r2 of e9 ?",
        "    step 1",
        "    think     look it up",
        "    search    r2 of e9",
        "    result    [cut] r2 of e9 is e41",
        "    step 2",
        "    answer    e41",
        "    ended     completed, reward 1, correct, advantage +0.70",
        "update 2/20  reward 0.500  correct 25%  calls 1.50  entropy 0.123  time 2.0s",
        "evaluated update 1: accuracy 0.5",
        "warning: two\u241b[2J",
        "interrupted and saved; go on with: treegraft train r.toml --resume runs/demo",
        "finished runs/demo",
        "  metrics    runs/demo/metrics.jsonl",
        "  trees      runs/demo/trees",
        "  checkpoint c",
        "  ask it     treegraft run c QUESTION",
    ]


@pytest.mark.parametrize(
    ("asked", "is_terminal", "lines"),
    [(True, False, 1), (False, True, 0), (None, False, 0), (None, True, 1)],
)
def test_progress_is_shown_where_it_is_asked_for_or_seen(
    asked: bool | None, is_terminal: bool, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    with shown(asked) as display:
        display.started(Path("runs/a"), "tiny on search_world", 2)
    assert stream.getvalue().count("run runs/a: tiny on search_world") == lines


def test_a_display_of_the_callers_own_is_handed_over_and_left_open() -> None:
    told: list[str] = []

    class Mine(NoDisplay):
        def warn(self, text: str) -> None:
            told.append(text)

        def close(self) -> None:
            told.append("closed")

    with shown(Mine()) as display:
        display.warn("slow")
        display.update(1, 2, METRICS)
    assert told == ["slow"]


def test_branches_and_grafts_are_shown_if_there_are_any() -> None:
    file = io.StringIO()
    PlainDisplay(file).update(
        1, 2, {**METRICS, "branch/num_branches": 12.0, "graft/num_grafts": 0.0}
    )
    assert "branches 12  time 2.0s" in file.getvalue()


def test_a_program_without_standard_output_is_shown_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with display_on(None) as display:
        display.note("nothing")
    with shown(None) as display:
        display.note("nothing")


@pytest.mark.smoke
def test_training_goes_on_without_standard_output(tmp_path: Path) -> None:
    own = {"name": "a", "dir": str(tmp_path), "num_updates": 1}
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps(tiny(run=own)))
    command = f"{shlex.quote(sys.executable)} -m treegraft train {recipe} >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"update": 1,' in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_the_best_trajectory_is_the_sample() -> None:
    tree = example_tree()
    best = pick_sample(tree)
    assert best is not None and best.leaf.step_id == "0.0.0"
    assert pick_sample(Tree(task=tree.task, group_id="g", steps=tree.steps[:1], leaves=())) is None
    assert evaluation_line({"learn/loss": 1.0}) == ""


def test_an_evaluation_on_one_line() -> None:
    metrics = {
        "eval/accuracy": 0.415,
        "eval/accuracy_1_hop": 0.6,
        "eval/accuracy_sampled": 0.38,
        "eval/accuracy_sampled_1_hop": 0.5,
        "eval/pass_at_4": 0.72,
        "eval/failed_frac": 0.0,
        "time/eval_s": 3.0,
    }
    said = "accuracy 0.415, accuracy_sampled 0.38, pass_at_4 0.72"
    assert evaluation_line(metrics) == said
    assert evaluation_line({"eval/failed_frac": 0.1}) == "failed_frac 0.1"


def test_a_name_of_a_run_cannot_steer_the_terminal() -> None:
    file = io.StringIO()
    run = Path("runs/\x1b[31mred\x07")
    shown = PlainDisplay(file)
    shown.started(run, "tiny", 2)
    shown.finished(run, run / "checkpoints" / "update-000002", METRICS)
    shown.interrupted(f"treegraft train --resume {run}")
    text = file.getvalue()
    assert text.count("runs/␛[31mred␇") >= 5 and not {"\x1b", "\x07"} & {*text}


@pytest.mark.parametrize("command", ["compare", "buffer stats"])
def test_commands_print_the_name_of_a_run_without_escapes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "\x1b[31mred\x07").name
    buffer = Path(run) / "buffer" / "traces.sqlite"
    TraceBuffer(buffer, "hashing").close()
    places = [run, run] if command == "compare" else [str(buffer)]
    done = CliRunner().invoke(app, [*command.split(), *places])
    assert done.exit_code == 0 and "␛[31mred␇" in done.output
    assert not {"\x1b", "\x07"} & {*done.output}
