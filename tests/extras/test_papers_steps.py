"""The steps of docs/papers.md, in order and with their flags, on the recipes' smoke tests."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_server import said, serving
from tests.support.pages import PAGES, ROOT

from treegraft.cli import main as cli
from treegraft.core.listener import address_of, listen
from treegraft.extras.search.local import open_corpus
from treegraft.extras.search.serve import search_app
from treegraft.extras.suites.sets import load_sets, parse_names

SMOKE = ROOT / "recipes" / "papers" / "smoke"
SMALL = ("train", "sft", "buffer build")
"""Commands that take --smoke."""


def steps() -> list[str]:
    """The commands of Treegraft between the section's heading and the next one of its level."""
    section = PAGES["papers.md"].partition("## From an empty machine to a row")[2]
    section = section.partition("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```", section, re.M | re.S)
    lines = [re.sub(r"\s+#\s.*$", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("treegraft ")]


def test_the_sets_of_the_smoke_data_are_read_in_the_releases_form() -> None:
    names = parse_names("arpo,rapo")
    found = load_sets(names, data_dir=SMOKE / "sets")
    assert [len(one.tasks) for one in found] == [1] * 15
    assert {one.tasks[0].reference[0].lower() for one in found} == {"168", "ada moss", "norland"}


def test_the_steps_reach_the_row() -> None:
    words = [line.split() for line in steps()]
    assert [one[1] for one in words].count("train") == 5
    assert {"serve", "buffer", "train", "eval", "compare", "doctor"} == {one[1] for one in words}
    # Typed settings name what the smoke test has as well.
    assert any("rapo-reasoning" in line and "--data-dir evaluation" in line for line in steps())


def agent(body: dict[str, Any], number: int) -> tuple[int, Any]:
    """A server that searches once and then answers, or judges."""
    texts = [str(message["content"]) for message in body["messages"]]
    if "VERDICT" in texts[0] or "verdict" in texts[0].lower():
        return said("VERDICT: CORRECT")
    rows = [json.loads(line) for line in (SMOKE / "searches.jsonl").read_text().splitlines()]
    wanted = next(
        row["conversations"][1]["value"]
        for row in rows
        if any(row["conversations"][0]["value"] in text for text in texts)
    )
    call, _, rest = wanted.partition("</search>")
    has_searched = any(message["role"] == "assistant" for message in body["messages"])
    return said(rest.partition("</result>")[2] if has_searched else call)


@contextmanager
def searching() -> Iterator[str]:
    """The service of step 3 over the smoke test's corpus."""
    import uvicorn

    socket = listen("127.0.0.1", 0)
    app = search_app(open_corpus(str(SMOKE / "corpus.jsonl")), default_top_k=1, host="127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
    thread.start()
    try:
        yield f"{address_of(socket)}retrieve"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.mark.slow
def test_each_step_runs_with_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evaluation").symlink_to(SMOKE / "sets")
    (tmp_path / "data" / "rl").mkdir(parents=True)
    for name in ("TREEGRAFT_DATA", "TREEGRAFT_TRACES"):
        monkeypatch.setenv(name, str(tmp_path / "data"))
    monkeypatch.setenv("TREEGRAFT_CORPUS", str(SMOKE / "corpus.jsonl"))
    (tmp_path / "data" / "rl" / "train_10k.parquet").write_bytes(parquet())
    with searching() as search, serving(agent, ["only"]) as (model, _):
        for line in steps():
            ran = line.replace("http://127.0.0.1:8100/retrieve", search)
            ran = re.sub(r"http://127\.0\.0\.1:800[01](/v1)?", model, ran)
            words = shlex.split(os.path.expandvars(ran))[1:]
            command = " ".join(words)
            if command.startswith(("serve", "doctor")):
                continue  # the service runs; sizes of cards are tests/extras/test_sizing.py's
            if command.startswith(SMALL) and "--resume" not in words:
                words.append("--smoke")
            if "papers/tool-star-qwen2.5-7b" in words:
                # There is no checkpoint of 7B here: that of the run above is measured.
                words[words.index("papers/tool-star-qwen2.5-7b")] = "runs/rapo"
            monkeypatch.setattr(sys, "argv", ["treegraft", *words])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            assert not ended.value.code, line
    report = json.loads((tmp_path / "evals" / "rapo" / "report.json").read_text())
    assert "hotpotqa" in json.dumps(report)


def parquet() -> bytes:
    """The smoke test's questions in the columns of the released file."""
    import io

    import pyarrow
    from pyarrow.parquet import write_table

    rows = [json.loads(line) for line in (SMOKE / "questions.jsonl").read_text().splitlines()]
    out = io.BytesIO()
    write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()
