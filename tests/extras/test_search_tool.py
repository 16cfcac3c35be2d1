"""The search tool: BM25 over a JSONL corpus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from tests.support.error_codes import raises_code

from treegraft.core.types import Task
from treegraft.extras.search.local import open_corpus
from treegraft.tools.search.tool import NO_MATCH, SearchTool

TASK = Task(id="t", question="?", reference=())
ROWS = [
    {"id": "a", "contents": "Paris is the capital\nof France"},
    {"id": 2, "contents": "Berlin is the capital of Germany"},
    {"id": "c", "contents": "Bananas are yellow"},
    {"id": "d", "contents": "Bananas are yellow"},
]


def corpus(folder: Path, *lines: str | bytes) -> str:
    path = folder / "corpus.jsonl"
    encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
    path.write_bytes(b"\n".join(encoded))
    return str(path)


def build(folder: Path, top_k: int = 3) -> SearchTool:
    return SearchTool(
        open_corpus(corpus(folder, *(json.dumps(row) for row in ROWS), "")), top_k=top_k
    )


def ask(tool: SearchTool, query: str) -> str:
    return asyncio.run(tool(query, TASK))


def test_the_best_passage_comes_first_on_one_line(tmp_path: Path) -> None:
    tool = build(tmp_path)
    assert ask(tool, "capital of France") == (
        "Doc 1: Paris is the capital of France\nDoc 2: Berlin is the capital of Germany"
    )


def test_equal_scores_keep_the_order_of_the_corpus(tmp_path: Path) -> None:
    backend = build(tmp_path).backend
    (found,) = asyncio.run(backend.search(["yellow"], 2))
    assert [passage.id for passage in found] == ["c", "d"] and found[0].score == found[1].score
    assert ask(build(tmp_path, top_k=1), "yellow") == "Doc 1: Bananas are yellow"
    assert ask(build(tmp_path, top_k=2), "capital yellow") == ask(
        build(tmp_path, top_k=2), "capital yellow"
    )


def test_no_match_is_a_sentence_and_no_error(tmp_path: Path) -> None:
    tool = build(tmp_path)
    for query in ("zebra", "the of is", "!?", "\ud800 \x00"):
        assert ask(tool, query) == NO_MATCH


def test_an_empty_query_is_an_error(tmp_path: Path) -> None:
    with raises_code("query-empty"):
        ask(build(tmp_path), " \n")


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ask(build(tmp_path), "capital")
    assert capfd.readouterr() == ("", "")


def test_variables_in_the_path_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path)
    monkeypatch.setenv("CORPUS_HOME", str(tmp_path))
    assert len(open_corpus("$CORPUS_HOME/corpus.jsonl")) == 4
    monkeypatch.delenv("CORPUS_HOME")
    with raises_code("corpus-missing", match=r"variable \$CORPUS_HOME is not set"):
        open_corpus("$CORPUS_HOME/corpus.jsonl")


GOOD = json.dumps(ROWS[0])


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([GOOD, "{"], "corpus-row-no-json"),
        ([GOOD, "", "[1]"], "corpus-row-invalid"),
        ([GOOD, '{"id": "x", "text": "y"}'], "corpus-key-missing"),
        (['{"contents": "y"}'], "corpus-key-missing"),
        (['{"id": "x", "contents": 3}'], "corpus-value-invalid"),
        ([GOOD, b'{"id": "\xff"}'], "corpus-not-utf8"),
        ([GOOD, "[" * 100_000], "corpus-row-no-json"),
        (["", " "], "corpus-empty"),
        (['{"id": "x", "contents": "..."}'], "corpus-without-words"),
    ],
)
def test_bad_rows_are_named_by_line(tmp_path: Path, lines: list[str | bytes], code: str) -> None:
    with raises_code(code):
        open_corpus(corpus(tmp_path, *lines))


def test_a_missing_file_or_path_is_an_error(tmp_path: Path) -> None:
    with raises_code("corpus-missing"):
        open_corpus(str(tmp_path / "nowhere.jsonl"))
    with raises_code("corpus-unnamed"):
        open_corpus("")
