"""The command line: what it prints, refuses and returns; training itself is replaced by
recorders."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.runs.test_terminal import example_tree
from tests.support.error_codes import raises_code

from treegraft.cli import main as cli
from treegraft.core.errors import CheckpointError, DataError, EngineError, ModelError, SettingError
from treegraft.settings.config import known_settings
from treegraft.settings.load import load_config

Run = Callable[..., int]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "r.toml"
    path.write_text("[run]\nseed = 5\n[warmup]\nnum_steps = 2\n")
    return path


@pytest.fixture
def treegraft(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line in this process; returns the exit code."""

    def run(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["treegraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return code if isinstance(code, int) else 0

    return run


@dataclass
class Result:
    metrics: dict[str, float]
    num_tasks: int = 3
    out: Path | None = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Puts recorders in the place of training and evaluation; a test may give `raises`."""
    seen: dict[str, Any] = {}

    def recorder(name: str, result: object) -> Callable[..., object]:
        def record(*args: object, **kwargs: object) -> object:
            seen[name] = (args, kwargs)
            if "raises" in seen:
                raise seen["raises"]
            return result

        return record

    train, evaluate, agent = map(
        types.ModuleType, ("treegraft.train", "treegraft.evals.evaluate", "treegraft.evals.agent")
    )
    vars(train).update(train=recorder("train", None), sft=recorder("sft", None))
    result = Result({"eval/accuracy": 0.5, "reward/my_rewards:brief": 0.25}, out=Path("x.jsonl"))
    vars(evaluate).update(evaluate_checkpoint=recorder("eval", result))
    vars(agent).update(
        answer_question=recorder(
            "run", (example_tree(thought="[b]hm[/b]").trajectories()[0], None)
        ),
    )
    monkeypatch.setitem(sys.modules, "treegraft.train", train)
    for one in (evaluate, agent):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return seen


def test_help_is_quick_and_free_of_torch() -> None:
    code = (
        "import sys, treegraft, treegraft.cli.main, treegraft.runs.display\n"
        "import treegraft.settings.load, treegraft.cli.doctor, treegraft.runs.metrics\n"
        "treegraft.Config, treegraft.load_config\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_module_runs_as_a_command() -> None:
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print(*{'pydantic'} & set(sys.modules)))\n"
        "sys.argv = ['treegraft', '--help']\n"
        "runpy.run_module('treegraft', run_name='__main__')"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert all(
        command in found.stdout for command in ("train", "sft", "eval", "run", "config", "cluster")
    )
    # Settings are for those who train; the list of commands does not wait for them.
    assert "pydantic" not in found.stdout


def test_train_hands_over_settings(treegraft: Run, calls: dict[str, Any], recipe: Path) -> None:
    assert treegraft("train", recipe, "learn.lr=1e-5", "run.name=first", "--resume", "runs/x") == 0
    (config,), named = calls["train"]
    assert (config.run.seed, config.learn.lr, config.run.name) == (5, 1e-5, "first")
    assert (
        named["recipe"] == str(recipe)
        and named["resume"] == Path("runs/x")
        and named["display"] is not None
    )


def test_sft_needs_steps(
    treegraft: Run, calls: dict[str, Any], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("sft", recipe) == 0
    assert calls["sft"][0][0].warmup.num_steps == 2
    assert treegraft("sft", recipe, "warmup.num_steps=0") == 2
    assert "nothing to fine-tune" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SettingError("bad [bold]setting[/bold]"), 2),
        (DataError("no rows"), 2),
        (ModelError("no tokenizer"), 2),
        (CheckpointError("damaged"), 3),
        (EngineError("died"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    treegraft: Run,
    calls: dict[str, Any],
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls["raises"] = error
    assert treegraft("train", recipe) == code
    printed = capsys.readouterr()
    assert str(error) in printed.err and "Traceback" not in printed.err + printed.out


def test_usage_and_setting_errors_are_code_2(
    treegraft: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("train") == 2
    assert treegraft("train", "missing.toml") == 2
    assert "recipe 'missing.toml' does not exist" in capsys.readouterr().err
    assert treegraft("trian", "demo") == 2
    said = capsys.readouterr().err
    assert "No such command 'trian'. Did you mean 'train'?" in said
    assert treegraft("--version") == 0
    assert capsys.readouterr().out == f"treegraft {cli.__version__}\n"


def test_a_mistake_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, calls: dict[str, Any], recipe: Path
) -> None:
    calls["raises"] = ZeroDivisionError("ours")
    monkeypatch.setattr(sys, "argv", ["treegraft", "train", str(recipe)])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_eval_by_recipe_and_as_json(
    treegraft: Run, calls: dict[str, Any], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("eval", "ckpt", "tasks.num_eval=7", "--recipe", recipe, "--json") == 0
    (_, config, overrides), _ = calls["eval"]
    assert config.run.seed == 5 and config.tasks.num_eval == 7 and overrides == []
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["eval/accuracy"] == 0.5 and found["num_tasks"] == 3
    assert treegraft("eval", "ckpt", "tasks.num_eval=7", "--out", "t.jsonl") == 0
    (checkpoint, config, overrides), named = calls["eval"]
    assert (checkpoint, config, overrides) == (Path("ckpt"), None, ["tasks.num_eval=7"])
    assert named["out"] == Path("t.jsonl")
    printed = capsys.readouterr().out
    assert "ckpt: 3 tasks" in printed and "eval/accuracy" in printed and "trees: x.jsonl" in printed


def test_eval_of_a_recipe_asks_its_own_model(treegraft: Run, calls: dict[str, Any]) -> None:
    # An option may come first.
    assert treegraft("eval", "--json", "demo", "tasks.num_eval=7") == 0
    (checkpoint, config, overrides), _ = calls["eval"]
    assert (checkpoint, config.model.path, config.tasks.num_eval, overrides) == (
        None,
        "tiny",
        7,
        [],
    )


def test_eval_refuses_what_has_no_effect(
    treegraft: Run, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("eval", "ckpt", "learn.lr=1") == 2
    assert "'learn.lr' would have no effect" in capsys.readouterr().err and "eval" not in calls


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("serve", "search", "c", "tools.search.kind=web"), "got 'web', expected bm25 or dense"),
        (("serve", "search", "c", "tools.search.encoder=hashing"), "tools.search.kind is 'bm25'"),
        (("serve", "search", "c", "tools.deadline_s=3"), "takes notice of tools.search.kind"),
    ],
)
def test_commands_without_a_recipe_take_some_settings(
    arguments: tuple[str, ...], part: str, treegraft: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft(*arguments) == 2
    assert part in " ".join(capsys.readouterr().err.split())


def test_run_prints_each_step(
    treegraft: Run, calls: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("run", "ckpt", "r2 of e9 ?", "tools.deadline_s=1") == 0
    assert calls["run"][0] == (Path("ckpt"), "r2 of e9 ?", ["tools.deadline_s=1"])
    printed = capsys.readouterr().out
    assert "[b]hm[/b]" in printed and "answer" in printed


def test_config_explains_every_setting(
    treegraft: Run, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("config", recipe, "learn.lr=1e-5") == 0
    printed = capsys.readouterr().out
    assert "learn.lr = 1e-05 *\n    Peak learning rate" in printed
    assert re.search(r"^run.seed = \d+ \*$", printed, re.M) and 'run.dir = "runs"\n' in printed
    assert treegraft("config", recipe, "learn.lr=1e-5", "--json") == 0
    assert load_config(json.loads(capsys.readouterr().out)) == load_config(
        recipe, ["learn.lr=1e-5"]
    )


def test_config_prints_defaults_and_chosen_settings(
    treegraft: Run,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    def names(*words: object) -> list[str]:
        assert treegraft("config", *words) == 0
        printed = capsys.readouterr().out
        assert all(len(line) <= 80 for line in printed.splitlines() if line.startswith(" "))
        return re.findall(r"^([a-z_.]+) = ", printed, re.M)

    assert names() == list(known_settings())
    learn = [name for name in known_settings() if name.startswith("learn.")]
    assert names("learn") == names(recipe, "learn.") == learn
    assert names("run.seed", "top_p", "checkpoint") == [
        "run.seed",
        "eval.top_p",
        "checkpoint.every",
        "checkpoint.keep",
    ]
    assert treegraft("config", "warmup.graft_prob", "run.name", "eval.greedy") == 0
    printed = capsys.readouterr().out
    assert "run.name = none\n" in printed and "eval.greedy = true\n" in printed
    assert treegraft("config", "lern") == 2
    assert "Did you mean 'learn'" in capsys.readouterr().err


def test_compare_shows_runs_side_by_side(
    treegraft: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, accuracies in (("first", [0.25, 0.5]), ("second", [0.25, 0.75])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        lines = [
            {
                "update": n,
                "eval/accuracy_sampled": a,
                "rollout/num_tool_calls": 10 * n,
                "time/warmup_s": 40.0 * (n == 0),
            }
            for n, a in enumerate(accuracies)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert treegraft("compare", tmp_path / "first", tmp_path / "second") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["first", "second"] in shown and ["update", "1", "50.0%", "75.0%"] in shown
    assert ["tool", "calls", "10", "10"] in shown and ["warm-up", "s", "40", "40"] in shown
    assert treegraft("compare", tmp_path / "first", tmp_path / "second", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["accuracy"] == "eval/accuracy_sampled" and data["rows"]["update 1"] == [0.5, 0.75]
    assert treegraft("compare", tmp_path / "none") == 3


def too_large_for_torch() -> None:
    import torch

    torch.empty(1 << 50)


def too_large_in_a_group() -> None:
    try:
        too_large_for_torch()
    except RuntimeError as error:
        raise ExceptionGroup("two", [ValueError("x"), error]) from error


@pytest.mark.parametrize("work", [too_large_for_torch, too_large_in_a_group])
def test_memory_that_runs_out_is_one_paragraph(
    work: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", work)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("error: memory has run out (") and "treegraft doctor" in said
    assert "Traceback" not in said


def test_a_metrics_meaning_is_a_command_away(
    treegraft: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("config", "graft/num_grafts", "learn/entropy") == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "graft/num_grafts: attached steps of other agents"
    assert second.startswith("learn/entropy: ")


def test_an_empty_question_is_refused(tmp_path: Path) -> None:
    """Before a checkpoint is looked for: the folder is not there."""
    from treegraft.evals.agent import answer_question

    with raises_code("question-empty", match="question: got '  '"):
        answer_question(tmp_path / "nothing", "  ")
