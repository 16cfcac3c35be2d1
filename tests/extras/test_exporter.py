"""Metrics for a Prometheus server, and the dashboard whose queries ask for them."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny

from treegraft.extras.trackers.exporter import (
    ROLES,
    WAITS,
    Exporter,
    family_of,
    label_of,
)
from treegraft.runs.metrics import METRICS
from treegraft.runs.roles import read_roles
from treegraft.runs.run import Run
from treegraft.settings.load import load_config
from treegraft.train import train

DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "assets" / "grafana.json"


def needs_client() -> None:
    pytest.importorskip("prometheus_client", reason="the extra prometheus is not installed")


# --- names ----------------------------------------------------------------------------------------


def test_names_follow_from_those_of_the_metrics() -> None:
    assert family_of("reward/mean") == "treegraft_reward_mean"
    assert family_of("tools/{name}_calls") == "treegraft_tools_calls"
    assert family_of("time/tool_{name}_s") == "treegraft_time_tool_s"
    assert family_of("eval/accuracy_{category}") == family_of("eval/accuracy")
    assert label_of("treegraft_eval_accuracy") == "category"
    assert label_of("treegraft_health") == "name" and label_of("treegraft_reward_mean") is None
    own = {family_of(key) for key in ("mine/EM", "mine/BLEU", "MyScore")}
    assert own == {"treegraft_mine_EM", "treegraft_mine_BLEU", "treegraft_MyScore"}
    assert all(re.fullmatch("[a-z][a-z0-9_]*", family_of(key)) for key in METRICS)


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    families = {family_of(key) for key in METRICS} | set(ROLES) | {WAITS}
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    asked = [*(target["expr"] for target in targets), board["templating"]["list"][1]["query"]]
    names = {name for text in asked for name in re.findall(r"\btreegraft_\w+", text)}
    assert len(names) > 30 and names <= families
    for target in targets:
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) - {"run", "role"}
        names = set(re.findall(r"\btreegraft_\w+", target["expr"]))
        assert labels <= {label_of(name) for name in names} | (
            {"owner"} & labels if WAITS in names else set()
        )
    # No two panels lie on each other.
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


# --- answers --------------------------------------------------------------------------------------


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and value of each sample, by family, as Prometheus reads them."""
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families(text)
    return {one.name: [(each.labels, each.value) for each in one.samples] for one in families}


@pytest.fixture
def exporter() -> Iterator[tuple[Exporter, dict[str, float]]]:
    needs_client()
    metrics = {
        "reward/mean": 0.25,
        "tools/search_calls": 3.0,
        "eval/accuracy": 0.5,
        "eval/accuracy_two hops": 0.75,
        "mine/number": 7.0,
    }
    found = Exporter("127.0.0.1:0", lambda: metrics, run='a "run"', role="rank 0")
    yield found, metrics
    found.close()


def test_the_latest_values_are_answered(exporter: tuple[Exporter, dict[str, float]]) -> None:
    own, metrics = exporter
    labels = {"run": 'a "run"', "role": "rank 0"}
    found = samples(httpx.get(own.address).text)
    assert found["treegraft_reward_mean"] == [(labels, 0.25)]
    assert found["treegraft_tools_calls"] == [({**labels, "name": "search"}, 3.0)]
    assert found["treegraft_eval_accuracy"] == [
        ({**labels, "category": ""}, 0.5),
        ({**labels, "category": "two hops"}, 0.75),
    ]
    assert found["treegraft_mine_number"] == [(labels, 7.0)]
    assert found["process_resident_memory_bytes"][0][1] > 1e6
    text = httpx.get(own.address).text
    assert "# HELP treegraft_reward_mean mean reward of scored rollouts" in text
    metrics["reward/mean"] = 0.5
    assert samples(httpx.get(own.address).text)["treegraft_reward_mean"] == [(labels, 0.5)]


def test_actors_of_a_cluster_are_answered_while_they_are_there(tmp_path: Path) -> None:
    """From the file that the run folder holds meanwhile; nothing of it once it is old."""
    needs_client()
    actor = {"role": "engine", "number": 1, "host": "a", "state": "live", "since": 0.0, "fault": ""}
    actor |= {"starts": 2, "queue": None, "waits": {}, "version": 7, "cpu_s": 1.5}
    other = actor | {"role": "grower", "state": "down", "queue": 3, "version": None}
    other |= {"waits": {"tool search": 2}, "memory_bytes": 4096}
    path = tmp_path / "roles.json"
    path.write_text(json.dumps({"written": 1000.0, "roles": [actor, other]}), encoding="utf-8")
    now = [1010.0]
    own = Exporter(
        "127.0.0.1:0", dict, run="r", role="rank 0", roles=lambda: read_roles(path, now[0])
    )
    try:
        found = samples(httpx.get(own.address).text)
        engine, grower = (
            {"run": "r", "role": f"{name} 1", "host": "a"} for name in ("engine", "grower")
        )
        assert found["treegraft_role_up"] == [(engine, 1.0), (grower, 0.0)]
        assert found["treegraft_role_starts"] == [(engine, 2.0), (grower, 2.0)]
        assert found["treegraft_role_version"] == [(engine, 7.0)]
        assert found["treegraft_role_trees"] == [(grower, 3.0)]
        assert found["treegraft_role_cpu_seconds"] == [(engine, 1.5), (grower, 1.5)]
        assert found["treegraft_role_memory_bytes"] == [(grower, 4096.0)]
        assert found[WAITS] == [({**grower, "owner": "tool search"}, 2.0)]
        now[0] = 1031.0
        assert not any("role_" in family for family in samples(httpx.get(own.address).text))
    finally:
        own.close()


def test_an_address_of_ipv6_is_listened_at() -> None:
    needs_client()
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no loopback for IPv6")
    own = Exporter("[::1]:0", lambda: {"MyScore": 3.0}, run="a", role="r")
    try:
        assert "treegraft_MyScore" in httpx.get(own.address).text
    finally:
        own.close()


def test_foreign_names_and_taken_ports_are_refused(
    exporter: tuple[Exporter, dict[str, float]],
) -> None:
    own, _ = exporter
    assert httpx.get(own.address, headers={"Host": "evil.example"}).status_code == 421
    place = own.address.removeprefix("http://").removesuffix("/metrics")
    with raises_code("port-unusable"):
        Exporter(place, dict, run="b", role="rank 0")


def test_a_run_answers_while_it_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_client()
    seen: list[dict[str, list[tuple[dict[str, str], float]]]] = []
    made: list[Exporter] = []
    init, keep = Exporter.__init__, Run.close

    def noticed(self: Exporter, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    def asks(self: Run, evaluated: Any) -> None:
        keep(self, evaluated)
        seen.append(samples(httpx.get(made[0].address).text))

    monkeypatch.setattr(Exporter, "__init__", noticed)
    monkeypatch.setattr(Run, "close", asks)
    own = tiny(
        run={"dir": str(tmp_path), "name": "a"},
        track={"prometheus": "127.0.0.1:0"},
        warmup={"num_steps": 2},
    )
    train(own, display=False)
    labels = {"run": "a", "role": "rank 0"}
    versions = [found["treegraft_policy_version"] for found in seen]
    assert versions == [[(labels, float(number))] for number in range(3)]
    assert seen[2]["treegraft_tools_calls"][0][0] == {**labels, "name": "search"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(made[0].address)


def test_bad_places_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("9464", ":9464", "localhost:x", "localhost:70000"):
        with raises_code("settings-contradict", "track.prometheus"):
            load_config(tiny(track={"prometheus": place}))
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    own = tiny(run={"dir": str(tmp_path)}, track={"prometheus": "127.0.0.1:9464"})
    with raises_code("packages-missing"):
        train(own, display=False)
    assert not list(tmp_path.iterdir())
