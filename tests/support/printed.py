"""Printed commands at work: what their capital words stand for, the folder of a reader in which
they run, and processes that begin with everything loaded."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

from tests.support.pages import PAGES, ROOT, Printed, file_name

STAND_INS = {
    r"papers/RECIPE": "papers/arpo-reasoning-qwen2.5-3b",
    r"\bRECIPE(?= tools\.search)": "recipes/toolstar.toml",
    r"\bRECIPE\b": "recipes/demo.toml",
    r"\bRUN RUN\b": "runs/alone runs/grafted",
    r"buffer show BUFFER --task ID": "buffer show runs/grafted/buffer/traces.sqlite",
    r"\bRUN(\.\.\.)?(?= |$)|\bCHECKPOINT\b|runs/NAME": "runs/alone",
    r"\bSETS\b": "gsm8k=benchmarks/gsm8k.jsonl",
    r"\bSTUDY\b": "studies/sokoban.toml",
    r"TRAIN \[EVAL\]\.\.\.|\bFILE\b": "train.jsonl",
    r"\bFOLDER\b": "folder",
    r"\bPAGE\b": "CONTRIBUTING.md",
    r"\bCOMMIT\b": "HEAD",
    r"\bOUT\b": "copy",
    r"\bPYTHON\b": "python",
    r"\bPART\b(?!=)": "1",
    r"(?<=--gpus )N\b": "2",
    r"--trust COMMAND": "--trust config demo",
    r"\bCOMMAND\b": "train",
    r"(?<=^treegraft )NAME$": "config",
    r"\S*… ?": "",
}
"""Pattern in a line -> what a reader may write there."""


def meant(line: str) -> str:
    """Returns a printed line with words of a reader in place of those in capitals."""
    for pattern, word in STAND_INS.items():
        line = re.sub(pattern, word, line)
    return line


# ---------------------------------------------------------------------- processes


def _work(words: Sequence[str], folder: Path, out: Path) -> None:
    """Does in a process of its own what the command `treegraft` does."""
    os.chdir(folder)
    handle = os.open(out, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(handle, stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = list(words)
    sys.path = [one for one in sys.path if one not in ("", str(ROOT))]
    try:
        runpy.run_module("treegraft", run_name="__main__")
    finally:
        # A process of multiprocessing leaves them out.
        atexit._run_exitfuncs()


class Commands:
    """Runs commands; torch and Treegraft are loaded once for all of them, which is most of the
    time that a small command takes."""

    def __init__(self) -> None:
        self.context: ForkServerContext = multiprocessing.get_context("forkserver")
        loaded = ["torch", "transformers", "treegraft.train", "treegraft.cli.main"]
        loaded += ["tests.support.printed", "tests.support.loaded"]
        self.context.set_forkserver_preload(loaded)

    def run(self, line: str, folder: Path, timeout_s: float = 240.0) -> tuple[int, str]:
        """Returns the exit code and what was printed; a server gets Ctrl-C once it listens."""
        command, _, target = line.partition(" > ")
        words = shlex.split(command)
        out = folder / "out.txt"
        if words[0] == "treegraft":
            code, text = self._forked(words, folder, out, timeout_s)
        else:
            done = subprocess.run(
                command,
                shell=True,
                cwd=folder,
                env=_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=timeout_s,
            )
            code = done.returncode
            text = done.stdout
        if target:
            (folder / target).write_text(text, encoding="utf-8")
        return code, text

    def _forked(
        self, words: Sequence[str], folder: Path, out: Path, timeout_s: float
    ) -> tuple[int, str]:
        process = self.context.Process(target=_work, args=(words, folder, out))
        process.start()
        is_server = words[1] == "serve" or (words[1] == "view" and "--text" not in words)
        until = time.monotonic() + timeout_s
        while process.is_alive() and time.monotonic() < until:
            process.join(0.05)
            if is_server and out.exists() and "http://" in out.read_text(encoding="utf-8"):
                is_server = False
                time.sleep(0.2)
                os.kill(process.pid or 0, signal.SIGINT)
        if process.exitcode is None:
            process.kill()
            process.join()
        text = out.read_text(encoding="utf-8") if out.exists() else ""
        return process.exitcode or 0, text


def _environment() -> dict[str, str]:
    """What a reader's shell has: the commands of this environment, and nothing of pytest's."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHONPATH")}
    return {**own, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"}


# ---------------------------------------------------------------------- the reader's folder


def pages_files(page: str) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of the files that a page shows, and of the examples that it includes."""
    text = PAGES.get(page, "")
    for block in re.findall(r"^```(?:python|toml)\n(.*?)^```", text, re.M | re.S):
        if name := file_name(block):
            yield name, block
    for place in re.findall(r"^<!-- include: (examples/\S+) -->$", text, re.M):
        yield Path(place).name, (ROOT / place).read_text(encoding="utf-8")


def lay_out(folder: Path, one: Printed) -> None:
    """Puts the clone into a folder, and the files that the command's page shows. What commands
    write to is copied."""
    for name in ("README.md", "CONTRIBUTING.md", "recipes", "examples", "tests", "src"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("docs", "studies"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "Makefile", "LOG.md"):
        shutil.copy(ROOT / name, folder / name)
    if one.words[0] in ("python", "make"):
        (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name, text in pages_files(one.page):
        (folder / name).write_text(text, encoding="utf-8")
    write_data(folder)


def write_data(folder: Path) -> None:
    """Writes the files of data that pages name and leave to the reader."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(12)]
    chats = [
        {"messages": [{"role": "user", "content": row["question"]},
                      {"role": "assistant", "content": f"\\boxed{{{row['answer']}}}"}]}
        for row in rows
    ]  # fmt: skip
    passages = [
        {"id": str(n), "contents": f'"Number {n}"\nAfter {n} comes {n + 1}.'} for n in range(8)
    ]
    written = {
        "train.jsonl": rows,
        "problems.jsonl": [{**row, "answer": int(row["answer"])} for row in rows],
        "my_questions.jsonl": rows[:2],
        "chats.jsonl": chats,
        "corpus.jsonl": passages,
    }
    for name, lines in written.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name).write_text(text, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    if not (folder / "benchmarks").exists():
        sets = folder / "benchmarks"
        sets.mkdir()
        other = [{"question": f"{n} and 2?", "answer": str(n + 2)} for n in range(2)]
        math = [
            {"problem": row["question"], "answer": row["answer"], "solution": row["answer"]}
            for row in other
        ]
        gsm = [{**row, "answer": f"so #### {row['answer']}"} for row in other]
        for name, lines in {"gsm8k": gsm, "math500": math}.items():
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (sets / f"{name}.jsonl").write_text(text, encoding="utf-8")
