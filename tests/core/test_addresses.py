"""Secrets in addresses of settings: refused as such, taken from the environment by name, never
written or printed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.support.tiny import tiny
from tests.support.viewed import write_run

from treegraft import train
from treegraft.core.addresses import expanded, public, redacted
from treegraft.core.errors import SettingError, ToolError
from treegraft.extras.search.remote import RemoteSearch
from treegraft.settings.load import load_config
from treegraft.view.runs import open_runs
from treegraft.view.server import build_app

SECRET = "hunter2"
LITERAL = [
    f"https://user:{SECRET}@host/retrieve",
    f"https://{SECRET}@host:8000",
    f"https://host/retrieve?api_key={SECRET}&k=3",
    f"https://host/?X-Amz-Signature={SECRET}",
    f"wss://host/ws?token={SECRET}#x",
]
OPEN = [
    "http://127.0.0.1:8000/retrieve",
    "http://host/?index=wiki&topk=3",
    "https://user:${PW}@host/?key=${KEY}",
    "exact_match",
    "owner/model@main",
    "someone@example.org",
]


@pytest.mark.parametrize("text", LITERAL)
def test_secrets_are_hidden(text: str) -> None:
    assert SECRET not in redacted(f"of {text} and more") and "***" in redacted(text)
    assert "host" in redacted(text) and redacted(redacted(text)) == redacted(text)


@pytest.mark.parametrize("text", OPEN)
def test_all_else_stays(text: str) -> None:
    assert redacted(text) == text
    assert public({"a": [text, 3, None]}) == {"a": [text, 3, None]}


@pytest.mark.parametrize(
    "settings",
    [
        {"tools": {"search": {"kind": "http", "url": LITERAL[0]}}},
        {"tools": {"search": {"kind": "web", "base_url": LITERAL[2]}}},
        {"tools": {"mcp": [{"name": "x", "url": LITERAL[1]}]}},
        {"environment": {"kind": "openenv", "options": {"url": LITERAL[4]}}},
    ],
)
def test_a_recipe_with_a_secret_is_refused_and_the_error_does_not_tell_it(
    settings: dict[str, Any],
) -> None:
    with pytest.raises(SettingError, match=r"a password or a key.*\$\{PASSWORD\}") as caught:
        load_config(settings)
    assert SECRET not in str(caught.value)


def test_a_variable_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PW", SECRET)
    assert expanded("http://u:${PW}@h/", "a.b") == f"http://u:{SECRET}@h/"
    monkeypatch.delenv("PW")
    with pytest.raises(SettingError, match=r"a\.b: .* PW, which is not set"):
        expanded("http://u:${PW}@h/", "a.b")


def test_what_is_sent_has_the_secret_and_no_message_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", SECRET)
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return httpx.Response(500, json={})

    transport = httpx.MockTransport(answer)
    search = RemoteSearch("http://host/retrieve?key=${KEY}")
    monkeypatch.setattr(search, "_connection", lambda: httpx.AsyncClient(transport=transport))
    with pytest.raises(ToolError) as caught:
        asyncio.run(search.search(["q"], 1))
    assert asked == [f"http://host/retrieve?key={SECRET}"]
    assert SECRET not in f"{caught.value} {search.name} {search.fingerprint} {search.url}"


def test_no_file_of_a_run_holds_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", SECRET)
    address = "http://127.0.0.1:9/retrieve?key=${KEY}"
    settings = tiny(
        run={"num_updates": 1, "dir": str(tmp_path), "name": "run"},
        warmup={"num_steps": 1},
        tools={"search": {"kind": "http", "url": address}},
        track={"trackers": ["tensorboard"]},
    )
    result = train(settings, display=False)
    assert json.loads((result.run_dir / "config.json").read_text())["tools"]["search"]["url"] == (
        address
    )
    for file in result.run_dir.rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_the_viewer_hides_those_of_earlier_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "first", num_updates=1)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(
        json.dumps(config | {"tools": {"search": {"url": LITERAL[0]}}})
    )
    client = TestClient(build_app(open_runs([run])), base_url="http://127.0.0.1")
    found = client.get("/api/runs/first")
    assert SECRET not in found.text
    assert found.json()["settings"]["tools.search.url"] == "https://***@host/retrieve"
