"""Case studies: which questions are chosen and which trajectories shown, what is refused, and the
page in a real headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.extras.test_report import made_run
from tests.extras.test_report_command import treegraft
from tests.support.error_codes import raises_code
from tests.support.viewed import grown_tree, step, write_run
from tests.view.test_view_browser import CHROMIUM, INJECTIONS, browser

from treegraft.core.types import Leaf, StartCause, Status, StepContent, Task, Tree
from treegraft.extras.lab.report.cases import Cases, compare, write_cases
from treegraft.runs.record import RunFolder
from treegraft.runs.tree_files import write_trees

__all__ = ["browser"]


def asked(number: int, *right: bool | None, question: str = "") -> Tree:
    """Returns a held-out question with a trajectory for each of these verdicts."""
    steps = [step("0", "pp", StepContent(thought=question or f"question {number} ?"), None)]
    leaves = []
    for place, is_right in enumerate(right):
        answer = f"answer {place}"
        steps.append(step(f"0.{place}", "ss", StepContent(answer=answer), StartCause()))
        leaves.append(
            Leaf(
                step_id=f"0.{place}",
                status=Status.FAILED if is_right is None else Status.COMPLETED,
                reward=None if is_right is None else float(is_right),
                is_correct=is_right,
                answer=answer,
            )
        )
    task = Task(id=f"held/{number}", question=question or f"question {number} ?", reference=("z",))
    return Tree(task=task, group_id=f"0/{number}", steps=tuple(steps), leaves=tuple(leaves))


def evaluated(
    path: Path, evaluations: dict[int, Sequence[Tree]], kind: str = "greedy"
) -> tuple[None, Path]:
    """Returns a run with these evaluations by update."""
    made_run(path, {}, [{"update": 1, "reward/mean": 0.0}])
    for update, trees in evaluations.items():
        write_trees(RunFolder(path).trees_path(update, kind), trees)
    return None, path


def questions(verdicts: str) -> list[Tree]:
    """Returns one question a letter: r right, w wrong, x lost."""
    kinds = {"r": True, "w": False, "x": None}
    return [asked(number, kinds[one]) for number, one in enumerate(verdicts)]


def held(page: Path) -> Any:
    """Returns the data of a page."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())
    assert found is not None
    return json.loads(found[1])


def numbers(found: Cases) -> list[tuple[str, str]]:
    """Returns who was right and the task of each chosen question."""
    return [(found.words(kind), key[0]) for kind, key in found.chosen]


def test_differences_take_turns_in_the_order_of_the_questions(tmp_path: Path) -> None:
    first = evaluated(tmp_path / "A", {2: [*questions("rrrwwrx"), asked(99, True)]})
    second = evaluated(tmp_path / "B", {2: questions("wwrrwww")})
    found = compare([first, second], 3)
    assert {found.words(kind): count for kind, count in found.counts.items()} == {
        "only A right": 3,
        "only B right": 1,
        "neither right": 1,
        "both right": 1,
    }
    assert numbers(found) == [
        ("only A right", "held/0"),
        ("only B right", "held/3"),
        ("only A right", "held/1"),
    ]
    assert found.summary.startswith(
        "3 of 4 questions that differ (only A right: 3; only B right: 1"
    )
    assert [note.partition(" questions")[0] for note in found.notes] == [
        "Not counted: 1",
        "Not counted: 1",
    ]
    assert numbers(compare([first, second], 9))[-1] == ("only A right", "held/5")


def test_of_three_the_only_one_that_is_right_comes_first(tmp_path: Path) -> None:
    sides = [
        evaluated(tmp_path / name, {2: questions(verdicts)})
        for name, verdicts in (("A", "rrww"), ("B", "rwww"), ("C", "wwwr"))
    ]
    found = compare(sides, 9)
    assert numbers(found) == [
        ("only A right", "held/1"),
        ("only C right", "held/3"),
        ("A and B right", "held/0"),
    ]
    assert len(found.counts) == 8 and sum(found.counts.values()) == 4


def test_of_several_trajectories_the_majority_counts(tmp_path: Path) -> None:
    mostly = [asked(0, False, True, True), asked(1, True, False), asked(2, None, True, False, True)]
    first = evaluated(tmp_path / "A", {2: mostly}, "sampled")
    none = [asked(number, False) for number in range(3)]
    second = evaluated(tmp_path / "B", {2: none}, "sampled")
    found = compare([first, second], 9)
    # An equal split is not right; one that was lost does not count.
    assert numbers(found) == [("only A right", "held/0"), ("only A right", "held/2")]
    write_cases(found, tmp_path / "cases.html")
    shown = [case["sides"][0] for case in held(tmp_path / "cases.html")["cases"]]
    assert [(one["num_right"], one["num_judged"], one["leaf"]) for one in shown] == [
        (2, 3, 1),
        (2, 3, 1),
    ]
    assert [one["steps"][0]["content"]["answer"] for one in shown] == ["answer 1"] * 2


def test_one_run_is_compared_with_itself_at_other_updates(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "A", {0: questions("ww"), 10: questions("rw"), 20: questions("rr")})
    found = compare([run], 9)
    assert [side.label for side in found.sides] == ["A, update 0", "A, update 20"]
    assert numbers(found) == [
        ("only A, update 20 right", "held/0"),
        ("only A, update 20 right", "held/1"),
    ]
    assert numbers(compare([run], 9, [10, 20])) == [("only A, update 20 right", "held/1")]
    other = evaluated(tmp_path / "B", {10: questions("ww"), 30: questions("ww")})
    assert [side.file.update for side in compare([run, other], 1).sides] == [20, 30]
    assert [side.label for side in compare([run, other], 1, [10]).sides] == ["A", "B"]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "A", {0: questions("w")})
    with raises_code("cases-number", match="got 1 evaluations of A; expected 2 to 4"):
        compare([run, run], 1)
    many = [evaluated(tmp_path / f"m{n}", {0: questions("w")}) for n in range(5)]
    with raises_code("cases-number", match="got 5 evaluations"):
        compare(many, 1)
    with raises_code(
        "evaluation-missing", match=r"--at 7: run 'A' has no greedy evaluation there.*: 0"
    ):
        compare([run, many[0]], 1, [7])
    with raises_code(
        "evaluations-differ", match=r"of one kind \(A: greedy; m0: greedy\); expected sampled"
    ):
        compare([run, many[0]], 1, kinds=["sampled"])
    sampled = evaluated(tmp_path / "S", {0: questions("w")}, "sampled")
    with raises_code(
        "evaluations-differ", match=r"no evaluation of one kind \(A: greedy; S: sampled\)"
    ):
        compare([run, sampled], 1)
    other = [replace(asked(0, True), task=Task(id="held/0", question="other ?", reference=("z",)))]
    with raises_code("no-common-question", match="have no judged question in common"):
        compare([run, evaluated(tmp_path / "O", {0: other})], 1)
    (tmp_path / "study.jsonl").write_text("{}\n")
    with raises_code("cases-of-study", match="is a study, whose lines hold no trajectories"):
        compare([run, (None, tmp_path / "study.jsonl")], 1)


def test_the_command_writes_the_page_beside_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, run = evaluated(tmp_path / "A", {0: questions("ww"), 10: questions("rw")})
    options = ("--only", "sweep", "--cases", 5)
    assert treegraft(monkeypatch, "report", run, *options) == 0
    assert f"{run / 'cases.html'}: 1 of 1 questions that differ" in capsys.readouterr().out
    assert '<a href="cases.html">Case studies</a>' in (run / "report.html").read_text()
    assert treegraft(monkeypatch, "report", run, "--at", 0) == 2
    assert "--at would have no effect without --cases" in " ".join(capsys.readouterr().err.split())


def test_foreign_text_cannot_leave_its_place(tmp_path: Path) -> None:
    hostile = "</script><script>window.hacked=1</script><!--"
    sides = [
        evaluated(tmp_path / name, {0: [asked(0, right, question=hostile)]})
        for name, right in (("A", True), ("B", False))
    ]
    write_cases(compare(sides, 1), tmp_path / "cases.html")
    page = (tmp_path / "cases.html").read_text()
    # The data, and the script: nothing else opens or closes an element, nothing begins a comment.
    assert page.count("<script") == page.count("</script") == 2 and "<!--" not in page
    assert held(tmp_path / "cases.html")["cases"][0]["task"]["question"] == hostile


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 400)])
@pytest.mark.smoke
def test_the_page_in_a_browser(browser: Any, tmp_path: Path, scheme: str, width: int) -> None:
    # A tree with a graft and a branch among the trajectories, and texts that are markup.
    hostile = [asked(n, True, question=one) for n, one in enumerate(INJECTIONS)]
    grown = grown_tree(2, "held/g", note="x" * 300)
    right = replace(grown, leaves=grown.leaves[:1], steps=grown.steps[:4])
    wrong = replace(
        grown,
        leaves=grown.leaves[1:2],
        steps=tuple(one for one in grown.steps if one.id in ("0", "0.0", "0.0.1")),
    )
    losing = [replace(one, leaves=asked(n, False).leaves) for n, one in enumerate(hostile)]
    sides = []
    for name, trees in (("A", [*hostile, right]), ("B", [*losing, wrong])):
        path = write_run(tmp_path / name, with_buffer=False)
        write_trees(RunFolder(path).trees_path(2, "greedy"), trees)
        sides.append((None, path))
    write_cases(compare(sides, 99), tmp_path / "cases.html")
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
    )
    page = context.new_page()
    asked_for, said = list[str](), list[str]()
    page.on("request", lambda request: asked_for.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto((tmp_path / "cases.html").as_uri())
    assert page.locator("section.case").count() == len(INJECTIONS) + 1
    assert page.evaluate("window.hacked") is None and len(asked_for) == 1 and said == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    last = page.locator("section.case").last
    assert last.locator(".step.graft").count() == last.locator(".step.branch").count() == 1
    boxes = [last.locator("section.side").nth(n).bounding_box() for n in range(2)]
    assert (boxes[0]["y"] == boxes[1]["y"]) is (width > 700)
    assert "exact_match 1.00" in last.inner_text() and "expected e3" in last.inner_text()
    context.close()
