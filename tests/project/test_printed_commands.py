"""What is printed runs: every command of README, CONTRIBUTING and docs is parsed here, and, marked
slow, run at a small size."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from tests.support.pages import ROOT, Printed, printed
from tests.support.printed import Commands, lay_out, meant, pages_files

from treegraft.cli.main import app
from treegraft.extras.lab.study.file import read_study
from treegraft.settings.config import known_settings
from treegraft.settings.load import load_config

COMMANDS = printed()

ELSEWHERE = {
    r"make (check )?test$|make smoke|\.ci/run": "the suite, of which this test is a part",
    r"make docs": "tests/project/test_docs.py builds the site",
    r"make (install|vllm-env|verl-env|agents-env)": "fetches gigabytes from a package index",
    r"make check$": "ruff and mypy, which .ci/run runs before the tests",
    r"make audit": "asks PyPI's database; tests/project/test_audit.py reads its answers",
    r"make bench|(TREEGRAFT_DATA=… )?python -m benchmarks\.speed": "minutes; see test_bench.py",
    r"make card|python3? -m benchmarks\.card": "needs a GPU; test_card.py runs tiny sizes",
    r"make cluster-test|pytest -m slow tests/cluster": "minutes on three nodes; a test by itself",
    r"pytest (tests|-m \"slow or not slow\" tests/distributed)": "tests of the suite themselves",
    r"(python -m )?pytest -m slow tests/serving": "needs a vLLM server; a test by itself",
    r"treegraft train my_world\.toml$": "half a minute; tests/project/test_readme.py trains it",
    r"pytest$": "tests/cli/test_init.py runs the tests of a new project",
    r"torchrun": "several ranks; tests/distributed/test_jobs.py trains on them",
    r"python examples/own_": "tests/project/test_examples.py runs them",
    r"python -m verl\.": "a command of verl, which is not installed",
    r"treegraft verl-": "tests/extras/test_verl_rows.py writes files and arguments",
    r"python -m benchmarks\.trl": "minutes; tests/extras/test_trl.py trains",
    r"treegraft cluster": "several processes of Ray; tests/cluster runs it",
    r"treegraft eval suite \S+ (arpo|web|rapo)": "a hub's sets; tests/extras/test_eval_suites.py",
    r".*engine\.kind=vllm$": "needs a vLLM server; tests/serving trains with one",
    r"treegraft study studies/(?!.*--(table|lines|check))": (
        "hours; tests/extras/test_study.py runs the smoke test of each study"
    ),
    r"treegraft (train|sft) papers/": "test_recipe_files.py and test_papers_steps.py",
    r"treegraft (serve search|buffer stats) \$": "tests/extras/test_papers_steps.py",
    r"treegraft compare evals/grpo": "tests/extras/test_papers_steps.py compares them",
    r"python studies/figures/papers\.py": "tests/project/test_study_scripts.py draws",
    r"python -m studies\.pruning": "tests/project/test_pruning.py prunes",
    r"treegraft buffer build papers/": "needs a model of 7B; test_build_traces.py builds",
    r"treegraft buffer import runs/": "a tiny agent earns nothing; test_imports.py imports a run",
    r"treegraft buffer build .*agent=http": "needs a server; test_build_traces.py has one",
    r"treegraft study .* --out mine --table": "shows runs of hours; those of the clone are shown",
    r"treegraft --install-completion": "writes into the shell's start file",
    r"treegraft config explore\.half": "a page's extension; tests/project/test_readme.py loads it",
    r"treegraft train eight\.toml": "7B on eight GPUs; `treegraft doctor eight.toml` is run",
    r"treegraft train \S+ tools\.search\.kind=http": "needs a server; test_remote_search.py",
    r"treegraft train recipes/smollm2": "minutes of a language model's training; tests/serving",
    r"treegraft train (moved|my_recipe)\.toml": "tests/project/test_readme.py trains it",
    r"treegraft view out$": "the folder of a run in TRL; tests/extras/test_trl.py makes one",
    r"treegraft train mine\.toml": "tests/project/test_own_problem.py trains a step of it",
}
"""Commands that are not run here, by their beginnings, and the reason."""

CODES = {
    r"treegraft config recipes/demo\.toml (explore\.num_leafs|learning_rate)": 2,
    r"treegraft doctor papers/": 2,  # data and weights are missing
    r"treegraft serve search": 130,
}
"""Exit codes that pages speak of; 0 for all others."""

SMALL = {
    r"num_updates=\d+": "num_updates=1",
    r"update-000004/": "update-000001/",
    r"eval-000010-": "eval-000001-",
    r"--tasks 48 --rollouts 16 --paths 2": "--tasks 1 --rollouts 2 --paths 1 --out sign.jsonl",
    r"--steps 50 100 300 --margins 0 -5": "--steps 2 --margins 0 --tasks 2",
    r"--num 1000000 --texts 20000": "--num 400 --texts 50 --queries 8 --encoder hashing --runs 1",
    r"benchmarks\.tools$": r"benchmarks.tools 1",
    r"benchmarks\.fuzz (\S+)$": r"benchmarks.fuzz \1 --inputs 4 --folders 2",
    r"serving\.py (\S+)": r"serving.py \1 tasks_per_update=2 num_leaves=4 warmup.num_steps=2"
    " max_completion_tokens=32 --updates 2 --ways native native-2-ranks",
    r"(tasks_per_update=4 tasks\.options).*": r"\1.num_warmup=2 num_eval=2",
    r"^(treegraft (?:train|sft) (?!--resume|recipe\.toml|my_t).*?)(?: --smoke)?$": r"\1 --smoke",
    r"^(treegraft train recipe\.toml.*)$": r"\1 num_updates=1 tasks_per_update=2 num_eval=4"
    " warmup.num_steps=4 warmup.lr_warmup_steps=0",
    r"^(treegraft train --resume.*)$": r"\1 num_updates=2",
    r"^(treegraft buffer build \S+)$": r"\1 traces.sqlite",
    r"^(treegraft buffer build .*)$": r"\1 num_train=8",
    r"^(treegraft eval recipes/\S+)$": r"\1 num_eval=4",
    r"^(treegraft view (?!.*--text).*)$": r"\1 --no-browser",
    r"^(treegraft serve search .*)$": r"\1 tools.search.encoder=hashing --port 0",
    r"^make demo$": "make demo -o .venv/.treegraft-core",
    r"^make figures$": "make figures -o .venv/.treegraft-installed",
}
"""Pattern in a line -> what makes it small."""


def reason(line: str) -> str | None:
    """Returns why a line is not run here."""
    found = [why for pattern, why in ELSEWHERE.items() if re.match(pattern, line)]
    return found[0] if found else None


@functools.cache
def whole() -> Any:
    return typer.main.get_command(app)


def path_of(words: tuple[str, ...]) -> tuple[Any, list[str], Any]:
    """Returns the command of `treegraft` that words name, those after it, and its context."""
    command: Any = whole()
    context = command.context_class(command, info_name="treegraft")
    rest = list(words[1:])
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        if getattr(command, "invoke_without_command", False) and rest[0] not in command.commands:
            break
        name, command, rest = command.resolve_command(context, rest)
        context = command.context_class(command, parent=context, info_name=name)
    return command, rest, context


def is_name(one: Printed) -> bool:
    """Whether a sentence names a command of `treegraft`, and nothing to do with it."""
    words = tuple(shlex.split(meant(one.line)))
    return one.is_mention and words[0] == "treegraft" and not path_of(words)[1]


RUN = [one for one in COMMANDS if not is_name(one) and reason(one.line) is None]


def test_the_commands_of_the_pages_are_found() -> None:
    assert RUN
    assert {one.words[0] for one in COMMANDS} >= {"treegraft", "make", "python", "pytest"}


def test_no_reason_is_left_over() -> None:
    """Each is that of a command which is printed, and of none that a later one speaks of."""
    lines = [one.line for one in COMMANDS]
    for table in (ELSEWHERE, CODES):
        assert [key for key in table if not any(re.match(key, line) for line in lines)] == []
    changed = [meant(line) for line in lines]
    assert [key for key in SMALL if not any(re.search(key, line) for line in changed)] == []


# ---------------------------------------------------------------------- parsed


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the clone's recipes and studies."""
    folder = tmp_path_factory.mktemp("reader")
    for name in ("recipes", "studies"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "runs").mkdir()
    return folder


@pytest.mark.parametrize("one", COMMANDS, ids=lambda one: f"{one.page}: {one.line}")
def test_a_printed_command_is_understood(
    one: Printed, readers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(readers)
    for name, text in pages_files(one.page):
        (readers / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(readers))
    words = shlex.split(meant(one.line).partition(" > ")[0])
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "torchrun":
        words = ["treegraft", *words[words.index("treegraft") + 1 :]]
    check = {"treegraft": treegraft, "make": make, "python": python, "pytest": pytests}
    if words[0] in check:
        check[words[0]](words, monkeypatch)
    else:
        assert (ROOT / words[0]).stat().st_mode & 0o111


def treegraft(words: list[str], _: pytest.MonkeyPatch) -> None:
    """Through the parser; settings through the recipe."""
    if "explore.half" in words:  # the page's extension brings it
        return
    command, rest, context = path_of(tuple(words))
    if not rest:
        return
    if {"--help", "--install-completion"} & {*rest}:  # the latter's work begins while it is parsed
        command.make_parser(context).parse_args(rest)
        return
    command.parse_args(context, rest)
    given = context.params
    overrides = [word for word in given.get("overrides") or () if "=" in word]
    for word in overrides:
        # Options are those of a world.
        name = re.sub(r"options\..*", "options", word.partition("=")[0])
        assert any(one.endswith(f".{name}") for one in settings()), word
    if command.name == "study":
        known = read_study(Path(given["file"]))
        assert {*(given["only"] or ())} <= {*known.worlds, *known.arms}
    recipe = given.get("recipe")
    is_run = given.get("resume") or (recipe and recipe.startswith("runs/"))
    # That of `treegraft init`, in its folder, and one of the reader's own.
    if recipe and not is_run and recipe not in ("recipe.toml", "agent.toml"):
        taken = [word for word in overrides if not word.startswith("buffer.build.")]
        loads(recipe, *taken, smoke=bool(given.get("smoke")))


@functools.cache
def loads(recipe: str, *overrides: str, smoke: bool) -> None:
    """Once for all commands that ask for the same."""
    load_config(recipe, overrides, smoke=smoke)


@functools.cache
def settings() -> list[str]:
    return [f".{name}" for name in known_settings()]


def make(words: list[str], _: pytest.MonkeyPatch) -> None:
    # Without the options of a make that runs these tests: -s prints nothing.
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
    done = subprocess.run(
        [*words, "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0 and done.stdout, done.stderr
    names = re.findall(r"^([A-Z_]+) [?:]?=", (ROOT / "Makefile").read_text(), re.M)
    assert {word.partition("=")[0] for word in words if "=" in word} <= {*names}


def pytests(words: list[str], _: pytest.MonkeyPatch) -> None:
    assert all((ROOT / word).exists() for word in words if word.startswith("tests"))
    if "-m" in words:
        marks = set(re.findall(r"\w+", words[words.index("-m") + 1])) - {"or", "not", "and"}
        assert marks <= {"slow", "gpu"}


def python(words: list[str], _: pytest.MonkeyPatch) -> None:
    """The file is there, or the module is found."""
    is_module = words[1] == "-m"
    name, *arguments = words[2:] if is_module else words[1:]
    if name == "pytest":
        pytests([name, *arguments], _)
    elif not is_module:
        assert (Path(name) if name == "make_data.py" else ROOT / name).exists()
    elif not name.startswith(("verl.", "treegraft")):
        assert importlib.util.find_spec(name)


# ---------------------------------------------------------------------- run


class World(NamedTuple):
    """What commands find that others have made."""

    commands: Commands
    folder: Path


MADE = (
    "treegraft train recipes/demo.toml --smoke run.name=alone",
    "treegraft train recipes/demo.toml --smoke explorers='[\"graft\"]' run.name=grafted",
    "treegraft train recipes/demo.toml --smoke explorers='[\"entropy\"]' run.name=sure",
    "treegraft train sokoban --smoke run.name=sign",
    "treegraft buffer build recipes/demo.toml full.sqlite tasks.search_world.detour_prob=0.4 "
    "num_train=8",
)
AS = {"runs/arpo": "sure", "runs/sure": "sure", "runs/sign": "sign", "runs/alone": "alone"}
"""Which of the runs stands for that of a page; the one with grafts for all others."""


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Runs, buffers and lines of studies that the pages' commands make for each other."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    commands = Commands()
    for line in MADE:
        code, text = commands.run(line, folder)
        assert code == 0, f"{line}\n{text}"
    yield World(commands, folder)


def furnish(folder: Path, line: str, made: Path) -> None:
    """Puts what the line asks for into its folder, but not what it is to make."""
    words = shlex.split(line)
    for name in set(re.findall(r"(?<!=)\bruns/[\w-]+|=runs/[\w-]+", line)):
        place = name.removeprefix("=")
        if not (folder / place).exists():
            shutil.copytree(made / "runs" / AS.get(place, "grafted"), folder / place)
    if "runs" in words:
        shutil.copytree(made / "runs", folder / "runs")
    makes = words[4:5] if words[1:3] == ["buffer", "build"] else words[5:6]
    if "full.sqlite" in words and "full.sqlite" not in makes:
        shutil.copy(made / "full.sqlite", folder / "full.sqlite")
    if "pruned.sqlite" in line:
        shutil.copy(made / "full.sqlite", folder / "pruned.sqlite")
    is_read = "traces.sqlite" in words and words[2] in ("stats", "search")
    if is_read or "my.toml" in words:
        shutil.copy(made / "full.sqlite", folder / "traces.sqlite")
    if "credit_sign" in line:
        own = folder / "runs" / "sign" / "checkpoints"
        (own / "update-000001").rename(own / "update-000010")
    if "--revision best" in line or "checkpoints/best" in line:
        own = folder / "runs" / "first" / "checkpoints"
        shutil.copytree(own / "update-000001", own / "best", dirs_exist_ok=True)


def prepared(world: World, folder: Path, line: str) -> None:
    """Runs the commands of the page that come before this one and leave it a file."""
    before = {
        "parts.jsonl --": "treegraft study studies/parts.toml --lines > parts.jsonl",
        "methods.jsonl --": "treegraft study studies/methods.toml --lines > methods.jsonl",
        "train recipe.toml": "treegraft init mine",
        "compare evals/": "treegraft eval suite runs/alone gsm8k --data-dir benchmarks"
        " --into evals/first",
    }
    for part, command in before.items():
        if part in line:
            furnish(folder, command, world.folder)
            code, text = world.commands.run(command, folder)
            assert code == 0, text
    if "compare evals/" in line:
        shutil.copytree(folder / "evals" / "first", folder / "evals" / "second")


def small(line: str) -> str:
    """Returns the line at a size of seconds."""
    line = meant(line)
    for pattern, shorter in SMALL.items():
        line = re.sub(pattern, shorter, line)
    return line


def shrink_the_demo(folder: Path) -> None:
    """Makes the demo's recipe in a folder its own smoke test, for commands that name no size."""
    (folder / "recipes").unlink()
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    path = folder / "recipes" / "demo.toml"
    path.rename(path.with_name("whole.toml"))
    text = (ROOT / "recipes" / "demo.toml").read_text(encoding="utf-8")
    tables = "[smoke." + text.partition("\n[smoke.")[2]
    path.write_text('base = "whole.toml"\n\n' + tables.replace("[smoke.", "["), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("one", RUN, ids=lambda one: f"{one.page}: {one.line}")
def test_a_printed_command_runs(one: Printed, world: World, tmp_path: Path) -> None:
    lay_out(tmp_path, one)
    line = small(one.line)
    furnish(tmp_path, line, world.folder)
    prepared(world, tmp_path, line)
    if line.startswith(("make", "python docs/figures")):
        shrink_the_demo(tmp_path)
    if line.startswith("make"):
        line += f" BIN={Path(sys.executable).parent}"
    folder = tmp_path / "mine" if "train recipe.toml" in line else tmp_path
    code, text = world.commands.run(line, folder)
    expected = next((code for key, code in CODES.items() if re.match(key, one.line)), 0)
    assert code == expected, f"{line}\n{text}"
    assert "Traceback" not in text
