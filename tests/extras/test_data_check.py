"""What `treegraft data check` finds, in rows made for it and in the shared data with their known
defects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.corpus import DATA
from tests.support.error_codes import raises_code

from treegraft.cli import main as cli
from treegraft.extras.data.check import check_data, normalised, shingles, words

needs_data = pytest.mark.skipif(not (DATA / "rl").is_dir(), reason=f"no training data in {DATA}")


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


LONG = (
    "Which of the two directors of the film The Half-Way Girl was born first in the city of Vienna?"
)


def test_each_defect_is_found_at_its_row(tmp_path: Path) -> None:
    rows = [
        {"question": "one?", "answer": "1"},
        {"question": "two?", "answer": " "},
        {"question": " ", "answer": "3"},
        {"question": "four?", "answer": "None"},
        {"question": "five?", "answer": "['a', 'b']"},
        {"question": "six?", "answer": "\\frac{1}{2"},
        {"question": "Put it in \x08oxed{}", "answer": "7"},
        {"question": "ONE", "answer": "1."},
        {"question": "one ?", "answer": "2"},
        {"question": "ten?", "answer": "x" * 301},
    ]
    (file,) = check_data(write(tmp_path / "train.jsonl", *rows), []).files
    found = {finding.kind: finding.rows for finding in file.findings}
    assert found == {
        "blank reference": [1],
        "blank question": [2],
        "odd reference (a placeholder)": [3],
        "odd reference (a list written as text)": [4],
        "odd reference (braces that do not match)": [5],
        "control character in 'question'": [6],
        "repeated question": [7],
        "repeated question with another reference": [8],
        "odd reference (longer than 300 characters)": [9],
    }
    assert (
        next(one.example for one in file.findings if "control" in one.kind)
        == "Put it in \\x08oxed{}"
    )
    assert file.num_rows == 10 and (file.question_column, file.reference_column) == (
        "question",
        "answer",
    )


def test_without_a_column_of_references_the_options_are_named(tmp_path: Path) -> None:
    name = write(tmp_path / "train.jsonl", {"question": "one?", "outcome": "1", "level": 3})
    (file,) = check_data(name, []).files
    advice = next(one.example for one in file.findings if one.kind.startswith("no reference in"))
    assert file.reference_column == "none"
    assert "the columns are level, outcome, question" in advice
    assert "tasks.dataset.reference_column" in advice
    (file,) = check_data(name, [], reference="outcomes").files
    (other,) = (one for one in file.findings if one.kind == "no reference in outcomes")
    assert other.example.endswith("Did you mean 'outcome'?")
    assert not check_data(name, [], reference="outcome").files[0].findings


def test_three_ways_of_standing_in_the_training_data(tmp_path: Path) -> None:
    train = write(
        tmp_path / "train.jsonl",
        *(
            {"question": text, "answer": "x"}
            for text in (LONG, "Who wrote it?", "什么时候开始的呢")
        ),
    )
    asked = [
        LONG,
        LONG.upper().replace("?", " ?!"),
        LONG.replace("Vienna", "Graz"),
        "Who wrote them?",
        "Unrelated",
        "什么时候开始的呢\uff1f",
    ]
    evals = write(tmp_path / "eval.jsonl", *({"question": text, "answer": "x"} for text in asked))
    (found,) = check_data(train, [evals]).contamination
    assert [(one.eval_row, one.train_row, one.how) for one in found.overlaps] == [
        (0, 0, "exact"),
        (1, 0, "normalised"),
        (2, 0, "near"),
        (5, 2, "normalised"),
    ]
    # 20 words ("Half-Way" is two) have 18 sequences of three; with another last word 17 are shared
    # of 19.
    assert len(words(LONG)) == 20
    assert found.overlaps[2].similarity == pytest.approx(17 / 19)
    (strict,) = check_data(train, [evals], near=0.95).contamination
    assert [one.how for one in strict.overlaps] == ["exact", "normalised", "normalised"]


def test_small_texts_have_shingles_too() -> None:
    assert shingles("") == frozenset() and shingles("Two words") == frozenset({"two words"})
    assert shingles("a b c d") == frozenset({"a b c", "b c d"})
    # Two numbers stay two; the comma of a thousand goes.
    assert normalised("What is 1 + 23 ?") == "whatis1 23" != normalised("What is 12 + 3 ?")
    assert normalised("$1,000 a day") == normalised("1000 a day") == "1000aday"
    assert normalised("\uff34\uff48\uff45  End!") == "theend" and words("第3章") == [
        "第",
        "3",
        "章",
    ]


def test_files_that_cannot_be_used_are_refused_first(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl", {"question": "q", "answer": "1"})
    with raises_code("data-missing", match=r"no file 'none\.jsonl'"):
        check_data(good, ["none.jsonl"])
    with raises_code("column-missing", match=r"no column .*it has title"):
        check_data(write(tmp_path / "b.jsonl", {"title": "q"}), [])
    with raises_code("column-missing", match="no row"):
        check_data(write(tmp_path / "c.jsonl"), [])


def test_the_command_says_so_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write(tmp_path / "a.jsonl", {"question": "q one", "answer": "1"})
    bad = write(tmp_path / "b.jsonl", {"question": "q two", "answer": "1"})
    for arguments, code in (
        (["check", good], 0),
        (["check", good, bad], 0),
        (["check", good, good], 1),
        (["check", "none"], 2),
    ):
        monkeypatch.setattr(sys, "argv", ["treegraft", "data", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert (ended.value.code or 0) == code, arguments
    assert "1 of 1 questions stand in" in capsys.readouterr().out


@needs_data
def test_the_known_defects_of_the_validation_file_are_found() -> None:
    """The README of the data: corrupted prompts; AIME24, MATH500 and Bamboogle test questions stand
    in it."""
    evals = [
        str(DATA / "benchmarks" / f"{name}.jsonl") for name in ("aime24", "math500", "bamboogle")
    ]
    found = check_data(str(DATA / "rl" / "valid.parquet"), evals)
    findings = {one.kind: one for one in found.files[0].findings}
    prompts = findings["control character in 'prompt.content'"]
    assert (
        found.files[0].num_rows == 180
        and len(prompts.rows) == 180
        and "\\x08oxed" in prompts.example
    )
    assert [len(one.overlaps) > 0 for one in found.contamination] == [True, True, True]
    assert len(found.contamination[0].overlaps) == 30, "all of AIME24"


@needs_data
@pytest.mark.slow
def test_the_known_defects_of_the_training_file_are_found() -> None:
    """The README of the data: one blank reference, 38 repeats, about 15 SimpleQA, 5 HotpotQA and 1
    MATH500 questions."""
    evals = [
        str(DATA / "benchmarks" / f"{name}.jsonl") for name in ("simpleqa", "hotpotqa", "math500")
    ]
    found = check_data(str(DATA / "rl" / "train_10k.parquet"), evals)
    findings = {one.kind: len(one.rows) for one in found.files[0].findings}
    assert (
        findings["control character in 'prompt.content'"] == 10_000
        and findings["blank reference"] == 1
    )
    repeats = findings.get("repeated question", 0) + findings.get(
        "repeated question with another reference", 0
    )
    assert 38 <= repeats <= 60
    simpleqa, hotpotqa, math500 = (len(one.overlaps) for one in found.contamination)
    assert 14 <= simpleqa <= 25 and 5 <= hotpotqa <= 12 and 1 <= math500 <= 10
