"""Bad input to `treegraft cluster`: one paragraph, before any work."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny, write_recipe

from treegraft.__main__ import main
from treegraft.extras.ray import connection
from treegraft.extras.ray.actor import EngineActor, Place, alone, look, refuse_other, value_of
from treegraft.extras.ray.placement import place_of
from treegraft.extras.ray.settings import num_engines
from treegraft.settings.config import Config

Seen = dict[str, str]


def test_ray_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(connection.packages, "is_installed", lambda name: name != "ray")
    recipe = write_recipe(tmp_path / "tiny.json", tiny(run={"dir": str(tmp_path / "runs")}))
    monkeypatch.setattr("sys.argv", ["treegraft", "cluster", str(recipe)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "Ray is not installed" in error and "treegraft[ray]" in error
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("needs", "code"),
    [
        ({"CPU": 3.0, "GPU": 0.0}, "cluster-too-small"),
        ({"CPU": 1.0, "GPU": 8.0}, "cluster-too-small"),
    ],
)
def test_too_few(needs: dict[str, float], code: str) -> None:
    """A cluster of one CPU and no GPU, which for Ray has no entry then."""
    with raises_code(code):
        connection.refuse_small("local", needs, {"CPU": 1.0})


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"python": "3.9"}, "cluster-version-differs"),
        ({"torch": "1.0"}, "cluster-version-differs"),
        ({"treegraft": "0"}, "cluster-version-differs"),
        ({"token": ""}, "cluster-folder-unseen"),
        ({"cwd": "/there/is/no/such/folder"}, "cluster-folder-unseen"),
    ],
)
def test_a_machine_is_not_like_that_of_rank_0(
    change: Seen, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor's answer says why."""
    monkeypatch.setattr(logging.getLogger("treegraft"), "handlers", [])
    monkeypatch.chdir(tmp_path)
    token = tmp_path / "token"
    token.write_bytes(os.urandom(8))
    place = place_of(Config(), token)
    refuse_other("engine 0", look(str(token)), place)

    def opened(place: Place) -> None:
        value_of(asyncio.run(EngineActor(0, json.dumps(asdict(place))).open()))

    cwd = change.get("cwd", place.cwd)
    with raises_code(code, match="engine 0 on "):
        opened(replace(place, cwd=cwd, alike={**place.alike, **change}))


def test_a_folder_that_a_machine_does_not_see(tmp_path: Path) -> None:
    assert look(str(tmp_path / "missing"))["token"] == ""


def test_the_defaults_need_one_engine() -> None:
    def count(kind: str, **cluster: int) -> int:
        return num_engines(Config.model_validate({"engine": {"kind": kind}, "cluster": cluster}))

    assert [count(kind) for kind in ("native", "vllm")] == [1, 1]
    assert [count(kind, server_gpus=4) for kind in ("native", "vllm")] == [4, 1]
    assert [count(kind, server_gpus=16) for kind in ("native", "vllm")] == [16, 2]
    assert [count(kind, server_gpus=4, engines=2) for kind in ("native", "vllm")] == [2, 2]


def test_an_engine_starts_a_server_on_each_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or on as many together as its options take; all of them read one folder of weights."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    for options, gpus in (([], ["4", "5", "6", "7"]), (["-tp", "2"], ["4,5", "6,7"])):
        vllm = {"server_args": options}
        config = Config.model_validate({"engine": {"kind": "vllm", "vllm": vllm}})
        found = alone(config).engine.vllm
        assert found.gpus == gpus


@pytest.mark.parametrize("command", ["train", "sft"])
def test_settings_of_a_cluster_elsewhere(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["treegraft", command, "demo", "cluster.engines=2"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "'cluster.engines' would have no effect" in error


@pytest.mark.parametrize(
    ("tables", "code"),
    [
        ({"engine": {"kind": "vllm", "vllm": {"servers": ["http://a:1"]}}}, "servers-on-cluster"),
        ({"cluster": {"server_gpus": 8, "engines": 3}}, "engines-invalid"),
        # A share of 2/3 fits each GPU once, so that one of three engines would wait for ever.
        ({"cluster": {"server_gpus": 2, "engines": 3}}, "engines-invalid"),
    ],
)
def test_what_does_not_fit_a_cluster(tables: dict[str, Any], code: str) -> None:
    with raises_code(code):
        connection.refuse_unfit(Config.model_validate(tables))


def test_nobody_else_enters_the_folder_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def join(**options: Any) -> None:
        """Makes its folder as Ray does."""
        path = Path(options["_temp_dir"])
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
        made.append(path)
        # Sockets in it have names of up to 107 characters, path included.
        longest = path / "session_2026-11-25_07-00-00_123456_1234567" / "sockets" / "plasma_store"
        assert len(str(longest)) < 107

    monkeypatch.setattr(connection, "_join", join)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(shutdown=lambda: None))
    with connection._local({}):
        (path,) = made
        modes = [one.stat().st_mode & 0o777 for one in (path, *path.parents)]
        assert 0o700 in modes[: len(path.relative_to(tempfile.gettempdir()).parts)]
    assert not path.parent.exists()
