"""Trust on first use: run folders and checkpoints that this user did not make run nothing before
they are trusted."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from tests.support.error_codes import raises_code
from tests.support.tiny import tiny
from typer.testing import CliRunner

import treegraft
from treegraft.cli.main import app
from treegraft.core.errors import CheckpointError
from treegraft.runs import trust
from treegraft.runs.checkpoint import TrainState, checksums_of, read_state, state_json
from treegraft.runs.open import find_checkpoint, open_checkpoint, own_config
from treegraft.runs.resume import Resumed, resumed
from treegraft.runs.trust import is_trusted, require_trust, settings_of, what_acts
from treegraft.settings.config import Config
from treegraft.settings.load import load_config
from treegraft.settings.table import Setting, Settings, acting, walk


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of this user."""
    place = {"num_updates": 1, "dir": str(tmp_path_factory.mktemp("runs")), "name": "made"}
    result = treegraft.train(tiny(run=place, warmup={"num_steps": 1}), display=False)
    return result.run_dir


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.fixture(autouse=True)
def fresh() -> None:
    trust._trusted_here.clear()
    trust.accept(False)


@pytest.fixture
def another_user(fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who has trusted nothing yet."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def armed(run: Path, marker: Path) -> Path:
    """Has the settings of a run, in all places, start a command; returns its newest checkpoint."""
    server = {"name": "x", "command": ["touch", str(marker)], "start_timeout_s": 5.0}
    checkpoint = find_checkpoint(run)
    state = read_state(checkpoint)
    for path in (run / "config.json", settings_of(checkpoint)):
        settings = json.loads(path.read_text())
        settings["tools"]["mcp"] = [server]
        settings["run"]["num_updates"] = 2
        path.write_text(json.dumps(settings))
    resealed(checkpoint, state)
    return checkpoint


def resealed(checkpoint: Path, state: TrainState) -> None:
    """Makes the checksums of a checkpoint fit its files, as somebody would who has changed them."""
    path = checkpoint / "treegraft" / "state.json"
    names = json.loads(path.read_text())["checksums"]
    sums = {name: one for name, one in checksums_of(checkpoint).items() if name in names}
    path.write_text(state_json(state, sums))


def typed(*words: str | Path) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize("command", ["run", "eval", "train"])
def test_what_comes_from_elsewhere_starts_no_command(
    run: Path, tmp_path: Path, command: str
) -> None:
    marker = tmp_path / "marker"
    checkpoint = armed(run, marker)
    words: list[str | Path] = {
        "run": ["run", checkpoint, "e1 r1 ?"],
        "eval": ["eval", checkpoint],
        "train": ["train", "--resume", run],
    }[command]
    refused = typed(*words)
    assert isinstance(refused.exception, CheckpointError) and not marker.exists()
    assert f"runs: tools.mcp.command = ['touch', '{marker}']" in str(refused.exception)
    assert "treegraft --trust" in str(refused.exception)
    # Named on the command line, it acts, and does so without the word from then on.
    typed("--trust", *words)
    assert marker.exists()
    marker.unlink()
    trust._trusted_here.clear()
    typed(*words)
    assert marker.exists()


def test_a_run_of_ones_own_is_trusted_also_in_another_place(run: Path) -> None:
    own_config(run)
    open_checkpoint(run, None, ())
    for checkpoint in (run / "checkpoints").iterdir():
        assert is_trusted(settings_of(checkpoint))


@pytest.mark.parametrize("place", ["run", "checkpoint"])
def test_one_byte_that_has_changed_is_asked_about(run: Path, place: str) -> None:
    path = run / "config.json" if place == "run" else settings_of(find_checkpoint(run))
    path.write_bytes(path.read_bytes() + b" ")
    assert not is_trusted(path)
    if place == "run":
        with pytest.raises(CheckpointError, match="was not made by you, or has changed since"):
            own_config(run)


def test_another_user_is_asked_once(run: Path, another_user: None) -> None:
    with raises_code("folder-untrusted"):
        own_config(run)
    with raises_code("folder-untrusted"):
        open_checkpoint(run, None, ())
    treegraft.trust(run)
    trust._trusted_here.clear()
    own_config(run)
    open_checkpoint(run, None, ())


def test_settings_that_do_nothing_need_no_trust(run: Path, another_user: None) -> None:
    (run / "config.json").write_text('{"learn": {"lr": 0.1}}')
    assert is_trusted(run / "config.json")


def test_the_code_of_a_model_is_trusted_as_it_is(run: Path, another_user: None) -> None:
    checkpoint = find_checkpoint(run)
    changed(settings_of(checkpoint), "model", trust_remote_code=True)
    (checkpoint / "modeling.py").write_text("print(1)")
    treegraft.trust(checkpoint)
    assert is_trusted(settings_of(checkpoint))
    (checkpoint / "modeling.py").write_text("print(2)")
    assert not is_trusted(settings_of(checkpoint))
    with raises_code("folder-untrusted") as caught:
        require_trust(settings_of(checkpoint))
    assert "imports: 'modeling.py' (" in str(caught.value)


def test_a_plain_model_needs_no_trust(made: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(find_checkpoint(made), plain, ignore=shutil.ignore_patterns("treegraft"))
    config = load_config(tiny())
    assert open_checkpoint(plain, config, ())[1] == plain


def test_without_a_place_for_the_list_trust_lasts_as_long_as_the_process(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    trust._trusted_here.clear()
    treegraft.trust(run)
    own_config(run)
    trust._trusted_here.clear()
    with raises_code("folder-untrusted"):
        own_config(run)


def opening(run: Path) -> str:
    """Returns a program that opens a run as a resume does."""
    names = "from pathlib import Path; from treegraft.runs.open import own_config"
    return f"{names}; own_config(Path({str(run)!r}))"


def answered(run: Path, answer: str) -> tuple[int, str]:
    """Returns the status and the terminal's text of opening a run there, and answering so."""
    code = opening(run)
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=inner, stdout=inner, stderr=inner, close_fds=True
    )
    os.close(inner)
    os.write(outer, f"{answer}\n".encode())
    shown = b""
    try:
        while part := os.read(outer, 4096):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(outer)
    return process.wait(60), shown.decode()


def test_a_terminal_is_asked(run: Path, another_user: None) -> None:
    status, shown = answered(run, "n")
    assert status == 1 and "trust it from now on? [y/N]" in shown
    assert answered(run, "")[0] == 1
    status, shown = answered(run, "y")
    assert status == 0 and "[y/N]" in shown
    status, shown = answered(run, "n")
    assert status == 0 and "[y/N]" not in shown


def test_what_is_no_folder_of_ours_is_not_trusted(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a run folder nor a checkpoint"):
        treegraft.trust(tmp_path)


# --- what acts ------------------------------------------------------------------------------------


def test_what_settings_do_is_listed() -> None:
    settings = {
        "run": {"dir": "runs", "seed": 7, "name": "mine"},
        "tools": {
            "mcp": [
                {"name": "x", "command": ["sh", "-c", "evil\x1b[2J\u202e\n"], "env": ["AWS_KEY"]},
                {"name": "y", "url": "http://me:secret@host/mcp", "token_env": "AWS_KEY"},
            ],
            "use": ["search"],
            "browse": {"allow_private": True},
            "search": {"base_url": "host", "index_dir": "/home", "top_k": 5},
        },
        "reward": {"funcs": ["exact_match", "a.b:c"]},
        "model": {"path": "pypi:x", "trust_remote_code": True},
        "environment": {"kind": "verifiers", "options": {"taskset": "evil"}},
        "format": {"chat_template": "evil.jinja", "system_prompt": "http://host a.b:c"},
        "engine": {"vllm": {"python": "/tmp/evil", "server_args": ["--model", "evil"]}},
    }
    assert what_acts(settings) == [
        "runs: engine.vllm.python = '/tmp/evil'",
        "runs: engine.vllm.server_args = ['--model', 'evil']",
        r"runs: tools.mcp.command = ['sh', '-c', 'evil\x1b[2J\u202e\n']",
        "imports: environment.options = {'taskset': 'evil'}",
        "imports: format.chat_template = 'evil.jinja'",
        "imports: model.trust_remote_code = True",
        "imports: reward.funcs = ['exact_match', 'a.b:c']",
        "writes: tools.search.index_dir = '/home'",
        "reads: model.path = 'pypi:x'",
        "reads: tools.mcp.env = ['AWS_KEY']",
        "reads: tools.mcp.token_env = 'AWS_KEY'",
        "sends: tools.browse.allow_private = True",
        "sends: tools.mcp.url = 'http://***@host/mcp'",
        "sends: tools.search.base_url = 'host'",
    ]


class Undeclared(Settings):
    shell: str = ""
    limit: int = 3
    kind: Literal["a", "b"] = "a"


def test_what_nothing_declares_is_listed_as_it_is() -> None:
    """Settings of a plugin that is not here, or that says nothing of them; and other shapes."""
    settings = {"mine": {"x\n": 1}, "tools": {"mcp": [3], "other": "text"}, "run": "evil"}
    assert what_acts([1]) == ["unknown: '' = [1]"]
    assert what_acts(settings) == [
        r"unknown: 'mine' = {'x\n': 1}",
        "unknown: run = 'evil'",
        "unknown: tools.'other' = 'text'",
        "unknown: tools.mcp = [3]",
    ]
    own = {"shell": "rm -r /", "limit": 4, "kind": "b"}
    assert [*acting(Undeclared, own)] == [("unknown", "shell", "rm -r /")]


def declared(table: type[Settings], prefix: str = "") -> Iterator[Setting]:
    """Yields the settings of a table, with those of the entries of its lists of tables."""
    for found in walk(table, prefix):
        if found.table is None and found.entries is not None:
            yield from declared(found.entries, f"{found.name}.")
        elif found.table is None:
            yield found


def undeclared(table: type[Settings]) -> set[str]:
    """Returns the settings that would do something unknown with a text."""
    return {found.name for found in declared(table) if found.act("a text") == "unknown"}


def sounds_harmful(name: str, meaning: str = "") -> bool:
    """Whether a setting is named or described as those are that do something with a text."""
    words = "path|dir|folder|file|python|command|url|address|template|encoder|env|options|args"
    is_named = re.search(rf"(^|[._])({words})s?($|_)", name)
    return bool(is_named or re.search("import path|[Vv]ariables? |[Aa]ddress", meaning))


def test_every_setting_says_what_it_does_with_a_text() -> None:
    assert undeclared(Undeclared) == {"shell"}
    assert undeclared(Config) == set()
    # A wrong word is a hole too.
    assert sounds_harmful("tools.cache_path") and sounds_harmful("a.b", "An import path.")
    said = [one for one in declared(Config) if one.facts.acts == "nothing"]
    assert said
    assert [one.name for one in said if sounds_harmful(one.name, one.meaning)] == []


def asked(run: Path) -> str:
    """Returns the question of trust."""
    with pytest.raises(CheckpointError) as caught:
        own_config(run)
    assert caught.value.code == "folder-untrusted"
    return str(caught.value)


def changed(path: Path, table: str, **settings: Any) -> None:
    data = json.loads(path.read_text())
    data[table] |= settings
    path.write_text(json.dumps(data))


def test_a_question_shows_everything_or_is_not_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = [{"name": f"{n}", "command": ["sh", "-c", f"{'x' * 300} evil-{n}"]} for n in range(9)]
    changed(run / "config.json", "tools", mcp=servers)
    shown = asked(run)
    assert all(f"{'x' * 300} evil-{number}']" in shown for number in range(9))
    changed(run / "config.json", "format", system_prompt="a" * 5000)
    assert "evil-8" in asked(run), "what does nothing takes no room"
    changed(run / "config.json", "engine", options={"a": "b" * 5000})
    monkeypatch.setattr(trust, "_says_yes", lambda question: pytest.fail("asked"))
    shown = asked(run)
    assert "too many for a question. Read the file" in shown and "evil" not in shown
    trust.accept(True)
    own_config(run)


def test_the_name_of_a_folder_forges_no_line_of_the_question(run: Path) -> None:
    other = run.rename(run.with_name("a\x1b[2J\n  runs: nothing"))
    changed(other / "config.json", "tools", mcp=[3])
    shown = asked(other)
    assert "\x1b" not in shown and "\n  runs: nothing" not in shown


# --- what is trusted was listed -------------------------------------------------------------------


def test_what_changes_while_the_question_is_read_is_not_trusted(
    run: Path, another_user: None, monkeypatch: pytest.MonkeyPatch
) -> None:

    def agrees(question: str) -> bool:
        changed(run / "config.json", "track", trackers=["evil.module:Tracker"])
        return True

    monkeypatch.setattr(trust, "_says_yes", agrees)
    assert "evil" not in asked(run)
    monkeypatch.undo()
    assert "evil" in asked(run)


def test_trust_leaves_out_what_links_lead_to(run: Path, tmp_path: Path, another_user: None) -> None:
    other = Path(shutil.copytree(run, tmp_path / "other"))
    for one in (other / "checkpoints").iterdir():
        changed(settings_of(one), "track", trackers=["evil.module:Tracker"])
    own = find_checkpoint(run)
    linked = run / "checkpoints" / "update-000009"
    linked.symlink_to(find_checkpoint(other))
    treegraft.trust(run)
    assert is_trusted(run / "config.json") and is_trusted(settings_of(own))
    # Opened by the link, the question names the folder that is trusted.
    with raises_code("folder-untrusted") as caught:
        require_trust(settings_of(linked))
    assert f"treegraft.trust('{other}" in str(caught.value)


@pytest.mark.parametrize("command", ["run", "eval", "resume"])
def test_a_whole_checkpoint_of_another_user_is_asked_about(
    made: Path, tmp_path: Path, another_user: None, command: str
) -> None:
    """Made by Treegraft, with checksums that are whole."""
    other = tmp_path / "sent"
    shutil.copytree(made if command == "resume" else find_checkpoint(made), other)
    words: list[str | Path] = {
        "run": ["run", other, "e1 r1 ?"],
        "eval": ["eval", other],
        "resume": ["train", "--resume", other],
    }[command]
    refused = typed(*words)
    assert isinstance(refused.exception, CheckpointError)
    assert refused.exception.code == "folder-untrusted"


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", ".config.json.partial"])
def test_a_link_in_a_run_folder_empties_no_file(run: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(victim)
    typed("--trust", "train", "--resume", run, "run.num_updates=2", "--accept-changes")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "adapter_config.json", "additional_chat_templates/a.jinja"]
)
def test_a_file_added_to_a_checkpoint_is_noticed(run: Path, name: str) -> None:
    checkpoint = find_checkpoint(run)
    (checkpoint / "README.md").write_text("What it is good for.")
    open_checkpoint(run, None, ())
    added = checkpoint / name
    assert not added.exists()
    added.parent.mkdir(exist_ok=True)
    added.write_text("{}")
    for opening in (lambda: open_checkpoint(run, None, ()), lambda: going_on(run)):
        with raises_code("checkpoint-files-differ") as told:
            opening()
        assert f"{name} is new since" in str(told.value)


def going_on(run: Path) -> Resumed:
    """Opens a run as a resume does."""
    return resumed(run, None, accepts_changes=False)


@contextmanager
def deadline() -> Iterator[None]:
    """Ends what waits for the writer of a pipe."""

    def late(*_: Any) -> None:
        pytest.fail("it waits for the writer of a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", ["config.json", "warmup.jsonl", ".lock"])
def test_a_pipe_in_a_run_folder_keeps_no_resume_waiting(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with deadline(), raises_code("run-entry-foreign"):
        going_on(run)


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("state.json", "checkpoint-without-state"),
        ("config.json", "checkpoint-files-differ"),
    ],
)
def test_a_pipe_in_a_checkpoint_keeps_nobody_waiting(run: Path, name: str, code: str) -> None:
    place = find_checkpoint(run) / "treegraft" / name
    place.unlink()
    os.mkfifo(place)
    with deadline(), raises_code(code):
        going_on(run)
    with deadline(), raises_code(code):
        open_checkpoint(run, None, ())
