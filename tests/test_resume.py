"""Law 6 (stop and resume equals an undisturbed run), law 12 (one seed, one run), and Ctrl-C."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.forked import Forked
from tests.support.tiny import contents, differing, tiny, write_recipe
from tests.support.tiny_parts import SlowSearch

from treegraft.core.errors import CheckpointError
from treegraft.core.interrupt import OTHERS, Ended, Stop, exit_status, others_as_ctrl_c, run_to_end
from treegraft.policy import shards
from treegraft.policy.learn.learner import Learner
from treegraft.runs.checkpoint import latest_checkpoint, read_state
from treegraft.runs.display import PlainDisplay
from treegraft.runs.record import RunFolder, read_metrics
from treegraft.runs.trust import trust
from treegraft.train import RunResult, sft, train

ROOT = Path(__file__).resolve().parents[1]

# Three updates; a checkpoint after each and four times during the warm-up; an evaluation before,
# between and after.
SETTINGS = tiny(run={"num_updates": 3}, eval={"num_samples": 1})

MOMENTS: dict[str, tuple[str, int, str]] = {
    # The warm-up has 32 steps, each one optimiser step, and saves after 8, 16, 24 and 32.
    "before any checkpoint": ("treegraft.policy.learn.optimiser:MasterAdamW.step", 2, "before"),
    "in the warm-up": ("treegraft.policy.learn.optimiser:MasterAdamW.step", 21, "after"),
    "after the warm-up": ("treegraft.policy.learn.learner:Learner.forget_moments", 1, "after"),
    "half of a line of metrics written": (
        "treegraft.runs.record:RunFolder.append_metrics",
        2,
        "half",
    ),
    "learning, between two optimiser steps": (
        "treegraft.policy.learn.learner:Learner._optimiser_step",
        4,
        "before",
    ),
    # Trees of two evaluations, the first update, two evaluations, the second update.
    "half of an evaluation written": ("treegraft.runs.tree_files:write_atomically", 5, "half"),
    "half of the trees written": ("treegraft.runs.tree_files:write_atomically", 6, "half"),
    "a checkpoint written, not renamed": ("treegraft.policy.checkpoint:checksums_of", 8, "after"),
    "an old checkpoint half removed": ("treegraft.runs.checkpoint:remove_folder", 5, "before"),
}


def run_jobs(folder: Path, settings: dict[str, Any], jobs: Sequence[dict[str, Any]]) -> list[int]:
    """Returns the exit code of each job, see tests/support/killed_runs.py."""
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = ["tests.support.killed_runs", folder, folder / "settings.json", folder / "jobs.json"]
    with Forked(command, cwd=ROOT, stderr=subprocess.STDOUT) as process:
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, said
    outcomes: list[int] = json.loads((folder / "outcomes.json").read_text())
    return outcomes


@pytest.fixture(scope="module")
def killed(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[Path, dict[str, int]]:
    """An undisturbed run, and one for each moment that is tested, killed there and resumed; with
    the exit code of each job."""
    folder = tmp_path_factory.mktemp("killed")
    jobs: list[dict[str, Any]] = [{"name": "undisturbed", "kill": None, "resume": False}]
    calls = (getattr(item, "callspec", None) for item in request.session.items)
    moments = [one.params["moment"] for one in calls if one and "moment" in one.params]
    for name in moments:
        kill = MOMENTS[name]
        jobs.append({"name": name, "kill": kill, "resume": False})
        jobs.append({"name": name, "kill": None, "resume": True})
    outcomes = run_jobs(folder, SETTINGS, jobs)
    return folder, {
        f"{job['name']}, resumed" if job["resume"] else job["name"]: n
        for job, n in zip(jobs, outcomes, strict=True)
    }


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_is_as_if_nothing_had_happened(
    moment: str, killed: tuple[Path, dict[str, int]]
) -> None:
    folder, outcomes = killed
    log = (folder / f"{moment}.log").read_text()
    assert outcomes[moment] == -signal.SIGKILL, log
    assert outcomes[f"{moment}, resumed"] == 0, log
    assert differing(folder / "undisturbed", folder / moment) == []


def test_what_is_compared_is_everything(killed: tuple[Path, dict[str, int]]) -> None:
    found = contents(killed[0] / "undisturbed")
    names = "\n".join(found)
    for name in (
        "config.json",
        "metrics.jsonl",
        "trees/update-000003.jsonl.zst",
        "trees/eval-000000-greedy.jsonl.zst",
    ):
        assert name in names
    for name in (
        "model.safetensors",
        "treegraft/optimiser.safetensors",
        "treegraft/state.json",
        "tokenizer.json",
    ):
        assert f"checkpoints/update-000003/{name}" in names and f"checkpoints/best/{name}" in names
    assert [line["update"] for line in found["metrics.jsonl"]] == [0, 1, 2, 3]
    assert all(line["learn/grad_norm"] > 0 for line in found["metrics.jsonl"][1:])
    # keep = 2, and the best besides.
    kept = {name.split("/")[1] for name in found if name.startswith("checkpoints/")}
    assert kept == {"update-000002", "update-000003", "best"}


# --- in this process ------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def start(folder: Path, name: str, **tables: Any) -> RunResult:
    return train(
        tiny(**{**tables, "run": {"name": name, "dir": str(folder), **tables.get("run", {})}})
    )


def test_one_seed_is_one_run_and_another_is_another(undisturbed: Path, tmp_path: Path) -> None:
    for name, seed in (("b", 3), ("c", 4)):
        start(tmp_path, name, run={"seed": seed})
    assert differing(undisturbed, tmp_path / "b") == []
    assert "trees/update-000001.jsonl.zst" in differing(undisturbed, tmp_path / "c")


def test_latencies_of_tools_change_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        SlowSearch.luck.seed(name)
        slow = {"kind": "tests.support.tiny_parts:SlowWorld"}
        start(tmp_path, name, tasks=slow, warmup={"num_steps": 24})
    assert differing(tmp_path / "a", tmp_path / "b") == []
    assert read_metrics(tmp_path / "a")[-1]["tools/search_calls"] > 0


# --- longer, shorter, elsewhere, at the same time -------------------------------------------------


def test_a_finished_run_can_go_on_longer_and_equals_a_long_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tmp_path, "long", run={"num_updates": 2}, eval={"at_end": False, "every": 1})
    first = start(tmp_path, "short", run={"num_updates": 1}, eval={"at_end": False, "every": 1})
    before = contents(first.run_dir)
    again = train(None, resume=first.run_dir, display=PlainDisplay(sys.stdout))
    printed = capsys.readouterr().out
    assert (
        "is finished after update 1" in printed
        and f"train --resume {first.run_dir} run.num_updates=2" in printed
    )
    assert again == first and contents(first.run_dir) == before
    longer = tiny(
        run={"num_updates": 2, "name": "short", "dir": str(tmp_path)},
        eval={"at_end": False, "every": 1},
    )
    train(longer, resume=first.run_dir)
    # The short run logged its gain at what was its end.
    metrics = [read_metrics(tmp_path / name) for name in ("long", "short")]
    others = ("metrics.jsonl", "state.json", "config.json")
    assert [
        name
        for name in differing(tmp_path / "long", tmp_path / "short")
        if not name.endswith(others)
    ] == []
    assert [len(lines) for lines in metrics] == [3, 3]
    assert json.loads((tmp_path / "short" / "config.json").read_text())["run"]["num_updates"] == 2


def test_other_changes_are_refused(tmp_path: Path) -> None:
    run = start(tmp_path, "a", run={"num_updates": 1})
    own = {"name": "a", "dir": str(tmp_path)}
    with raises_code("resumed-other-settings"):
        train(tiny(run={**own, "num_updates": 2}, learn={"lr": 0.1}), resume=run.run_dir)
    with raises_code("updates-done"):
        train(tiny(run={**own, "num_updates": 0}), resume=run.run_dir)
    with raises_code("not-a-run"):
        train(None, resume=tmp_path / "nowhere")
    with raises_code("nothing-to-train"):
        train(None)


def test_a_run_of_0_7_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path, "a", run={"num_updates": 1})
    path = run.run_dir / "config.json"
    saved = json.loads(path.read_text())
    saved["rollout"]["max_staleness"] = 0
    path.write_text(json.dumps(saved))
    trust(run.run_dir)
    with raises_code("run-other-version", kind=CheckpointError, match="begin anew from the recipe"):
        train(None, resume=run.run_dir)


def test_two_processes_do_not_share_a_run(tmp_path: Path) -> None:
    run = start(tmp_path, "a", run={"num_updates": 1})
    folder = RunFolder.open(run.run_dir)
    folder.claim()
    with raises_code("run-in-use", match="another process is at work"):
        train(None, resume=run.run_dir)
    folder.release()
    assert train(None, resume=run.run_dir) == run


def test_a_run_folder_may_be_moved(tmp_path: Path) -> None:
    run = start(tmp_path, "a", run={"num_updates": 1})
    moved = run.run_dir.rename(tmp_path / "elsewhere")
    assert train(None, resume=moved).checkpoint_dir.parent == moved / "checkpoints"


def test_fine_tuning_alone_resumes_and_can_be_trained_on(undisturbed: Path, tmp_path: Path) -> None:
    settings = tiny(run={"name": "parts", "dir": str(tmp_path)})
    tuned = sft(settings)
    assert tuned.checkpoint_dir.name == "warmup-000032"
    assert sft(settings, resume=tuned.run_dir).checkpoint_dir == tuned.checkpoint_dir
    assert len(read_metrics(tuned.run_dir)) == 1
    train(None, resume=tuned.run_dir)
    assert differing(undisturbed, tuned.run_dir) == []


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupting(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    nth: int,
    presses: int = 1,
    number: int = signal.SIGINT,
) -> None:
    """Presses Ctrl-C, or sends another signal, at the nth call of a method."""
    original: Callable[..., Any] = getattr(owner, name)
    count = 0

    def pressed(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            for _ in range(presses):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, pressed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    return start(folder, "a").run_dir


@pytest.mark.parametrize(
    ("where", "nth", "kept"),
    [
        ("treegraft.policy.learn.optimiser:MasterAdamW.step", 5, "warmup-000005"),
        ("treegraft.session:evaluate", 1, "warmup-000032"),
        ("treegraft.rollout.loop:Grower.grow", 10, "update-000000"),
        ("treegraft.policy.learn.credit:credit_by_entropy", 3, "update-000002"),
        ("treegraft.session:evaluate", 2, "update-000001"),
    ],
    ids=["warm-up", "evaluation at the start", "sampling", "learning", "evaluation"],
)
def test_ctrl_c_saves_and_the_resumed_run_is_the_same(
    where: str,
    nth: int,
    kept: str,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import importlib

    module, _, path = where.partition(":")
    owner: Any = importlib.import_module(module)
    *outer, name = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    handler = signal.getsignal(signal.SIGINT)
    settings = tiny(run={"name": "a", "dir": str(tmp_path)}, checkpoint={"every": 1})
    with monkeypatch.context() as patch:
        interrupting(patch, owner, name, nth)
        with pytest.raises(KeyboardInterrupt):
            train(settings, display=PlainDisplay(sys.stdout))
    assert signal.getsignal(signal.SIGINT) is handler
    printed = capsys.readouterr().out
    assert (
        "stopping and saving" in printed
        and f"go on with: treegraft train --resume {tmp_path / 'a'}" in printed
    )
    checkpoint = latest_checkpoint(tmp_path / "a" / "checkpoints")
    assert checkpoint is not None and checkpoint.name == kept
    train(None, resume=tmp_path / "a")
    assert differing(undisturbed, tmp_path / "a") == []


def test_the_second_ctrl_c_stops_at_once(
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = tiny(run={"name": "a", "dir": str(tmp_path)})
    with monkeypatch.context() as patch:
        interrupting(patch, Learner, "learn", 2, presses=2)
        with pytest.raises(KeyboardInterrupt):
            train(settings, display=PlainDisplay(sys.stdout))
    printed = capsys.readouterr().out
    assert (
        "stopped at once" in printed
        and "and saved" not in printed
        and "treegraft train --resume" in printed
    )
    checkpoint = latest_checkpoint(tmp_path / "a" / "checkpoints")
    assert checkpoint is not None and read_state(checkpoint).update == 1
    train(None, resume=tmp_path / "a")
    assert differing(undisturbed, tmp_path / "a") == []


def test_the_command_line_tells_the_signal_and_resumes_without_a_recipe(tmp_path: Path) -> None:
    settings = tiny(
        run={"name": "a", "dir": str(tmp_path), "num_updates": 500},
        warmup={"num_steps": 2},
        eval={"every": 0, "at_start": False},
        checkpoint={"every": 500},
    )
    recipe = write_recipe(tmp_path / "r.json", settings)
    command: list[str | Path] = ["treegraft", "train"]
    resume: list[str | Path] = ["--resume", tmp_path / "a"]
    first: list[str | Path] = [recipe]
    for arguments, number in ((first, signal.SIGINT), (resume, signal.SIGTERM)):
        lines: list[str] = []
        with Forked([*command, *arguments], stderr=subprocess.STDOUT, cwd=tmp_path) as process:
            for line in process.stdout:
                if line.startswith("update ") and not any(
                    one.startswith("update ") for one in lines
                ):
                    process.send_signal(number)
                lines.append(line)
            assert process.wait(60) == 128 + number
        assert any("interrupted and saved" in line for line in lines)
    done = read_metrics(tmp_path / "a")[-1]["update"]
    assert done >= 2
    with Forked([*command, *resume, f"run.num_updates={done + 1:.0f}"], cwd=tmp_path) as process:
        said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert errors == "" and f"update {done + 1:.0f}/{done + 1:.0f}" in said


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """Signals that end a process; `nohup` before the tests would have SIGHUP ignored."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in OTHERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("as_in_a_terminal")
@pytest.mark.parametrize("number", OTHERS, ids=lambda number: signal.Signals(number).name)
def test_other_signals_save_too_and_a_second_one_changes_nothing(
    number: int,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = tiny(run={"name": "a", "dir": str(tmp_path)}, checkpoint={"every": 5})
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        interrupting(patch, Learner, "learn", 1, presses=2, number=number)
        with pytest.raises(Ended) as ended:
            train(settings, display=PlainDisplay(sys.stdout))
    assert exit_status(ended.value) == 128 + number and signal.getsignal(number) is handler
    name = signal.Signals(number).name
    printed = capsys.readouterr().out
    assert f"got {name}; stopping and saving" in printed and "stopped at once" not in printed
    assert (
        f"interrupted and saved; go on with: treegraft train --resume {tmp_path / 'a'}" in printed
    )
    assert (tmp_path / "a" / "checkpoints" / "update-000001").is_dir()
    train(tiny(run={"name": "a", "dir": str(tmp_path)}), resume=tmp_path / "a")
    others = ("config.json", "state.json")  # of the checkpoints' interval
    unlike = differing(undisturbed, tmp_path / "a")
    assert [one for one in unlike if not one.endswith(others)] == []


def test_no_signal_breaks_into_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = tiny(run={"name": "a", "dir": str(tmp_path)}, checkpoint={"every": 5})
    with monkeypatch.context() as patch:
        interrupting(patch, Learner, "learn", 1)
        original = shards.save_file

        def pressed(*args: Any) -> None:
            # The one that the Ctrl-C above asks for.
            if (tmp_path / "a" / "checkpoints" / ".update-000001.partial").exists():
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
                    os.kill(os.getpid(), number)
                    time.sleep(0.01)
            original(*args)

        patch.setattr(shards, "save_file", pressed)
        with pytest.raises(KeyboardInterrupt):
            train(settings, display=PlainDisplay(sys.stdout))
    printed = capsys.readouterr().out
    assert "a checkpoint is being written" in printed and "interrupted and saved" in printed
    assert read_state(tmp_path / "a" / "checkpoints" / "update-000001").update == 1


def test_a_signal_while_a_command_is_loading_tells_its_number() -> None:
    with pytest.raises(SystemExit) as ended, others_as_ctrl_c():
        try:
            signal.raise_signal(signal.SIGUSR1)
        except KeyboardInterrupt as error:  # as Typer does
            raise SystemExit(130) from error
    assert exit_status(ended.value) == 128 + signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_whose_exception_is_lost_ends_the_run_all_the_same(
    number: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def begin() -> None:
        stop = Stop()
        with stop.on_signals(said.append, "stopping", "again"):
            assert stop.is_asked and stop.number == number

    class Collected:
        def __del__(self) -> None:
            os.kill(os.getpid(), number)

    said: list[str] = []
    with others_as_ctrl_c():
        Collected()  # Python prints the exception of a callback, and goes on
        asyncio.run(begin())
    assert said and "stopping" in said[0] and "ignored" not in capfd.readouterr().err

    async def undisturbed() -> None:
        stop = Stop()
        with stop.on_signals(said.append, "stopping", "again"):
            assert not stop.is_asked

    asyncio.run(undisturbed())


def test_a_signal_that_is_ignored_stays_ignored() -> None:
    """`nohup` has SIGHUP ignored, so that a run outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)

    async def work() -> bool:
        stop = Stop()
        with stop.on_signals(print, "stopping", "again"):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.01)
        return stop.is_asked

    try:
        assert run_to_end(work()) is False
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_outlives_its_terminal(undisturbed: Path, tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

    train(tiny(run={"name": "a", "dir": str(tmp_path)}), display=PlainDisplay(Gone()))
    assert differing(undisturbed, tmp_path / "a") == []


def test_a_notebook_is_stopped_and_waited_for() -> None:
    """Where an event loop runs already, the work has a thread of its own and Ctrl-C reaches it."""
    asked = threading.Event()

    async def work() -> str:
        while not asked.is_set():
            await asyncio.sleep(0.01)
        return "saved"

    async def notebook() -> str:
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return run_to_end(work(), on_interrupt=asked.set)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(notebook()) == "saved"
    finally:
        loop.close()
        signal.signal(signal.SIGINT, before)


# ---------------------------------------------------------------------- budgets of calls


def test_a_run_ends_with_its_calls_and_so_does_a_resumed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last update is the first that reaches the limit; the learning rate falls with the share
    that is spent; a run that was stopped on the way ends alike."""
    settings = tiny(
        run={"num_updates": 50, "max_calls": 40, "dir": str(tmp_path)},
        learn={"schedule": "linear"},
        eval={"every": 0, "num_samples": 1},
        track={"record_trees": False},
    )
    settings["run"]["name"] = "whole"
    whole = train(settings)
    lines = read_metrics(whole.run_dir)
    spent = [line.get("rollout/num_tool_calls", 0.0) for line in lines]
    before = [sum(spent[:n]) for n in range(len(spent) + 1)]
    assert before[-2] < 40 <= before[-1] and len(spent) < 51
    # At the end alone, though its update has no round number.
    assert "eval/accuracy" in lines[-1] and "eval/accuracy" not in lines[1]
    # The second of two optimiser steps has the same share left.
    left = [1 - done / 40 for done in before[1:-1]]
    assert [line["learn/lr"] for line in lines[1:]] == pytest.approx(
        [3e-3 * min(share, 1 - (2 * n + 1) / 100) for n, share in enumerate(left)]
    )
    settings["run"]["name"] = "stopped"
    train(settings, callbacks=[lambda update, metrics: update < 1])
    # The callback has its own line there.
    resumed = train(resume=tmp_path / "stopped").run_dir
    assert set(differing(resumed, whole.run_dir)) <= {"trackers.json"}
    assert read_state(whole.checkpoint_dir).spent[0] == before[-1]
    # With more calls than it made it goes on.
    train(resume=whole.run_dir, display=PlainDisplay(sys.stdout))
    assert "run.max_calls=80" in capsys.readouterr().out
    more = train(
        resume=tmp_path / "stopped", config={**settings, "run": settings["run"] | {"max_calls": 60}}
    )
    assert len(read_metrics(more.run_dir)) > len(lines)
