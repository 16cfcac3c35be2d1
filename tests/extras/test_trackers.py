"""Trackers: each gets every update once, with settings, warnings and summary; none ends a run.

The real libraries run without network: Weights & Biases offline, MLflow on files, trackio in a
folder.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from tests.support.error_codes import raises_code
from tests.support.pages import PAGES
from tests.support.tiny import tiny

from treegraft.core.errors import SettingError
from treegraft.core.registry import registered
from treegraft.core.types import Tree
from treegraft.runs.record import read_metrics
from treegraft.runs.trackers import Tracked, Trackers
from treegraft.settings.recipe import flatten
from treegraft.train import RunResult, train

SECRET = "local-0123456789abcdef0123456789abcdef01234567"

KINDS = registered("tracker")


class Own:
    """A tracker with every method, which fails as long as `faults` lasts."""

    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[list[Exception]] = []

    def __init__(self, run_dir: Path) -> None:
        self.calls.append(("made", run_dir.name))

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        if self.faults:
            raise self.faults.pop()
        self.calls.append(("log", update, dict(metrics)))

    def sample(self, update: int, trees: Sequence[Tree]) -> None:
        self.calls.append(("sample", update, len(trees)))

    def warn(self, update: int, name: str, text: str) -> None:
        self.calls.append(("warn", update, name))

    def close(self) -> None:
        self.calls.append(("close",))


class Unable(Own):
    """A tracker that cannot be made."""

    def __init__(self, run_dir: Path) -> None:
        raise OSError("no route to host\nand more")


class Half:
    """A tracker without `close`."""

    def __init__(self, run_dir: Path) -> None: ...

    def log(self, update: int, metrics: Mapping[str, float]) -> None: ...


@pytest.fixture(autouse=True)
def fresh() -> None:
    Own.calls = []
    Own.faults = []


def start(folder: Path, *trackers: str, updates: int = 2, resume: bool = False) -> RunResult:
    settings = tiny(
        run={"name": "a", "dir": str(folder), "num_updates": updates},
        track={"trackers": list(trackers)},
        warmup={"num_steps": 2},
        eval={"num_samples": 1},
        # No room for an answer, so that a warning begins.
        rollout={"max_completion_tokens": 2},
    )
    return train(settings, resume=folder / "a" if resume else None)


def logged() -> list[int]:
    return [call[1] for call in Own.calls if call[0] == "log"]


# --- a tracker of one's own -----------------------------------------------------------------------


def test_a_tracker_gets_what_happens_and_nothing_twice(tmp_path: Path) -> None:
    path = f"{__name__}:Own"
    run = start(tmp_path, path)
    kinds = [call[0] for call in Own.calls]
    assert kinds[:2] == ["made", "log"] and kinds[-1] == "close"
    assert logged() == [0, 1, 2]
    assert [call[1:] for call in Own.calls if call[0] == "sample"] == [(1, 3), (2, 3)]
    assert ("warn", 1) in [call[:2] for call in Own.calls]
    lines = read_metrics(run.run_dir)
    for line, call in zip(lines, (c for c in Own.calls if c[0] == "log"), strict=True):
        assert line == {"update": call[1], **call[2]}
    # The process dies after update 2 was logged and before its checkpoint: update 2 is repeated.
    Own.calls.clear()
    (run.run_dir / "checkpoints" / "update-000002").rename(tmp_path / "gone")
    start(tmp_path, path, updates=3, resume=True)
    assert logged() == [3]
    assert [call[1] for call in Own.calls if call[0] == "sample"] == [3]
    # One that joins late gets the whole curve.
    Own.calls.clear()
    (run.run_dir / "trackers.json").unlink()
    start(tmp_path, path, updates=4, resume=True)
    assert logged() == [0, 1, 2, 3, 4]


def test_a_failing_tracker_is_named_once_and_catches_up_after_a_resume(tmp_path: Path) -> None:
    said: list[str] = []
    tracked = Tracked.of(tmp_path)
    tracked.write()
    lines = [{"update": update, "policy_version": float(update)} for update in range(4)]
    trackers = Trackers({"own": Own}, tmp_path, lines[:1], said.append, said.append)
    Own.faults = [ValueError("fault 1")]
    for line in lines[1:]:
        trackers.log(line["update"], line, [])
    assert [text for text in said if "fault" in text] == [
        "tracker 'own' failed (ValueError: fault 1); the run goes on without it, metrics.jsonl has"
        " everything, and a resumed run sends what it lacks"
    ]
    assert logged() == [0] and Tracked.of(tmp_path).updates == {"own": 0}
    Trackers({"own": Own}, tmp_path, lines, said.append, said.append).close()
    assert logged() == [0, 1, 2, 3] and Own.calls[-1] == ("close",)
    assert Tracked.of(tmp_path).updates == {"own": 3} and Tracked.of(tmp_path).id == tracked.id


def test_one_that_cannot_be_made_never_ends_the_run(tmp_path: Path) -> None:
    said: list[str] = []

    class Shown:
        def warn(self, text: str) -> None:
            said.append(text)

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    settings = tiny(
        run={"name": "a", "dir": str(tmp_path), "num_updates": 1},
        track={"trackers": [f"{__name__}:Unable"]},
        warmup={"num_steps": 1},
    )
    run = train(settings, display=Shown())  # type: ignore[arg-type]
    assert (run.run_dir / "metrics.jsonl").exists()
    named = [text for text in said if "tracker" in text]
    assert len(named) == 1 and "(OSError: no route to host)" in named[0]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (f"{__name__}:Half", ("Half", "without close", "track.trackers")),
        ("builtins:int", ("track.trackers", "builtins:int")),
        ("wandbb", ("Did you mean 'wandb'", "track.trackers")),
    ],
)
def test_a_mistake_in_the_recipe_ends_before_any_work(
    name: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    with pytest.raises(SettingError) as caught:
        start(tmp_path, name)
    assert [part for part in parts if part not in str(caught.value)] == []
    assert [*tmp_path.iterdir()] == []


def test_an_extra_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in KINDS.items():
        monkeypatch.setitem(__import__("sys").modules, kind.facts["module"], None)
        with raises_code("package-missing"):
            start(tmp_path, name)


def test_a_damaged_note_is_said(tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text('{"id": 1}')
    with raises_code("tracked-unreadable"):
        Tracked.of(tmp_path)


# --- the real libraries ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """A run of two updates, resumed to three, with every tracker that is installed; yields its
    folder and their names."""
    folder = tmp_path_factory.mktemp("tracked")
    environment = {
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "WANDB_MODE": "offline",
        "WANDB_API_KEY": SECRET,
        "HF_TOKEN": f"hf_{SECRET}",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        names = [name for name, kind in KINDS.items() if _is_installed(kind.facts["module"])]
        start(folder, *names)
        start(folder, *names, updates=3, resume=True)
        yield folder, names


def _is_installed(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def needs(names: list[str], name: str) -> None:
    if name not in names:
        pytest.skip(f"{name} is not installed: pip install '{KINDS[name].facts['install']}'")


def expected(folder: Path) -> dict[str, dict[int, float]]:
    """Returns each metric's value by update."""
    found: dict[str, dict[int, float]] = {}
    for line in read_metrics(folder / "a"):
        for key in line.keys() - {"update"}:
            found.setdefault(key, {})[int(line["update"])] = line[key]
    return found


def test_no_secret_is_in_the_run_folder(resumed: tuple[Path, list[str]]) -> None:
    folder, names = resumed
    files = [path for path in (folder / "a").rglob("*") if path.is_file()]
    assert any("wandb" in path.parts for path in files) == ("wandb" in names)
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_trackio(resumed: tuple[Path, list[str]]) -> None:
    folder, names = resumed
    needs(names, "trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("treegraft") == ["a"]
    config = SQLiteStorage.get_run_config("treegraft", "a")
    assert config["loss.clip_high"] == 0.28
    rows = SQLiteStorage.get_logs("treegraft", "a")
    seen: dict[str, dict[int, Any]] = {}
    for row in rows:
        for key in row.keys() - {"step", "timestamp"}:
            assert row["step"] not in seen.setdefault(key, {}), key
            seen[key][row["step"]] = row[key]
    wanted = expected(folder)
    assert {key: seen[key] for key in wanted} == wanted
    assert any(" at update 1" in alert["title"] for alert in SQLiteStorage.get_alerts("treegraft"))


def test_mlflow(resumed: tuple[Path, list[str]]) -> None:
    folder, names = resumed
    needs(names, "mlflow")
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("treegraft")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    settings = flatten(json.loads((folder / "a" / "config.json").read_text()))
    # Those of the beginning: a parameter cannot change there.
    settings["run.num_updates"] = 2
    assert run.data.params == {name: str(value) for name, value in settings.items()}
    for key, values in expected(folder).items():
        history = client.get_metric_history(run.info.run_id, key)
        assert Counter(point.step for point in history) == Counter(values.keys()), key
        assert {point.step: point.value for point in history} == values


def test_wandb(resumed: tuple[Path, list[str]]) -> None:
    """Both parts of the run have its id, and hold its curves."""
    folder, names = resumed
    needs(names, "wandb")
    files = sorted((folder / "a" / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.stem for path in files] == [f"run-{Tracked.of(folder / 'a').id}"] * 2
    for path in files:
        written = path.read_bytes()
        assert b"at update 1" in written or path != files[0]
        assert b"reward/mean" in written and b"loss.clip_high" in written


def test_tensorboard(resumed: tuple[Path, list[str]]) -> None:
    folder, names = resumed
    needs(names, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "a" / "tensorboard"))
    events.Reload()
    for key, values in expected(folder).items():
        assert {e.step: e.value for e in events.Scalars(key)} == {
            update: pytest.approx(value, rel=1e-6) for update, value in values.items()
        }
    (settings,) = (folder / "a" / "tensorboard").glob("*/hparams.yml")
    assert "loss.clip_high: 0.28" in settings.read_text()


def test_the_recipe_of_the_page_runs(
    resumed: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks marked runnable run in test_readme; this one needs the extras."""
    (block,) = re.findall(r"```toml\n(# tracked\.toml\n.*?)```", PAGES["trackers.md"], re.S)
    track = tomllib.loads(block)["track"]
    monkeypatch.setenv("TRACKIO_PROJECT", "search-agents")
    for name in track["trackers"]:
        needs(resumed[1], name)
    settings = tiny(
        run={"name": "page", "dir": str(tmp_path), "num_updates": 0},
        track=track,
        warmup={"num_steps": 1},
    )
    train(settings)
    from trackio.sqlite_storage import SQLiteStorage

    assert SQLiteStorage.get_runs("search-agents") == ["page"]
    assert [*(tmp_path / "page" / "wandb").glob("offline-run-*/*.wandb")] != []
