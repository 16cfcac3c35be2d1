"""The registry: the core without extensions, a package outside the repository, and extensions that
cannot be taken. Each in a process of its own, as extensions are loaded once."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.error_codes import raises_code
from tests.support.forked import Forked
from tests.support.tiny import tiny

from treegraft.core.registry import (
    CORE_NAMES,
    Entry,
    Registry,
    extensions,
    registered,
    registered_with_commands,
)
from treegraft.extras import BUILT_IN, WITH_COMMANDS
from treegraft.runs.record import read_trees
from treegraft.runs.tree_json import tree_to_json

ROOT = Path(__file__).resolve().parents[2]

MINE = '''
"""A package of somebody else's, written against the public face alone."""

from treegraft import Trajectory
from treegraft.parts import (
    Branch, BranchCause, Contradiction, ExplorerKind, Finding, Independent, OutcomeKind, Registry,
    Settings, Start, has, setting,
)


class EchoSettings(Settings):
    """Branches after every result."""

    num_starts: int = setting(2, ge=1)
    """First-level rollouts."""
    num: int = setting(1, ge=1)
    """Branches after each result."""


class Ends(Settings):
    echo_share: float = setting(0.5, idle_unless=has("explore.explorers", "echo"))
    """Share of echoes."""


class Echo(Independent):
    probe_tokens = 0

    def __init__(self, settings):
        self.settings = settings

    def starts(self, max_leaves):
        return Start(min(self.settings.num_starts, max_leaves))

    def after_probe(self, path, probe):
        cause = BranchCause(entropy_change=0.0, probability=1.0, rule="echo")
        return Branch(self.settings.num, cause)


def short(*, trajectories, **_):
    return [1.0 - len(path.token_ids) / 1000 for path in trajectories]


def centred(members, eps):
    rewards = [path.reward for path in members]
    mean = sum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


class Tracker:
    def __init__(self, run_dir):
        self.path = run_dir / "mine.txt"

    def log(self, update, metrics):
        with self.path.open("a") as file:
            file.write(f"{update}\\n")

    def close(self):
        pass


class Corridor:
    """A corridor of three rooms."""

    capability = "none"

    def reset(self, **row):
        self.place = 0

    def step(self) -> str:
        """Goes one room on."""
        self.place += 1
        return f"room {self.place}"


def corridor(settings):
    from treegraft.parts import ClassEnvironments

    return ClassEnvironments(Corridor, "corridor", settings)


def hello(name: str = "you") -> None:
    """Say hello."""
    print(f"hello {name}")


def lengths(folders, as_json):
    print([len((folder / "words.txt").read_text()) for folder in folders], as_json)


def wrong(config):
    if "echo" in config.explore.explorers and config.explore.echo.num > 3:
        yield Contradiction(("explore.echo.num",), "explore.echo.num: expected at most 3.")


def register(registry: Registry) -> None:
    registry.explorer(
        "echo",
        ExplorerKind(
            make=lambda explore, facts: Echo(explore.echo),
            leads=True,
            leaves="explore.echo.num_starts",
            opens_at_once=True,
            branches=True,
        ),
        table=EchoSettings,
        settings={"credit": Ends},
        checks=(wrong,),
        metrics={"echo/num": "echoes of an update"},
    )
    registry.credit("centred", OutcomeKind(compare=centred))
    registry.reward("short", short)
    registry.environment("corridor", "mine:corridor")
    registry.part("tracker", "lines", "mine:Tracker")
    registry.command("hello", "mine:hello", help="Say hello.")
    registry.command("eval greetings", "mine:hello", help="Measure greetings.")
    registry.part("comparison", "words.txt", "mine:lengths")
'''


PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "mine"
version = "1.0"
dependencies = ["treegraft"]
[project.entry-points."treegraft.plugins"]
mine = "mine"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the wheel of a package of somebody else's."""
    pytest.importorskip("hatchling", reason="hatchling is missing: pip install 'treegraft[dev]'")
    source = tmp_path_factory.mktemp("source")
    folder = tmp_path_factory.mktemp("site")
    (source / "mine.py").write_text(MINE, encoding="utf-8")
    (source / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-index"]
    built = ["wheel", *alone, "--no-build-isolation", "--wheel-dir", str(source), str(source)]
    done = subprocess.run([*pip, *built], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (wheel,) = source.glob("mine-1.0-*.whl")
    installed = ["install", *alone, "--target", str(folder), str(wheel)]
    done = subprocess.run([*pip, *installed], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


def install(folder: Path, source: str, name: str = "mine") -> Path:
    """Lays a package into a folder as pip does, with its entry point."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[treegraft.plugins]\n{name} = {name}\n")
    return folder


def run(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, folders), str(ROOT / "src"), str(ROOT)])
    own = {**os.environ, "PYTHONPATH": path, **environment}
    with Forked(["-c", code], cwd=Path(), env=own, is_fresh=True) as process:
        said = process.communicate(timeout=300)
        return subprocess.CompletedProcess(code, process.wait(), *said)


def treegraft(arguments: list[str], *folders: Path, **environment: str) -> tuple[int, str]:
    code = f"import sys; sys.argv = ['treegraft', *{arguments!r}]\n"
    code += "from treegraft.__main__ import main; main()"
    done = run(code, *folders, **environment)
    return done.returncode, done.stdout + done.stderr


# ---------------------------------------------------------------------- the core alone

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("treegraft.extras"):
            raise ModuleNotFoundError(f"no {name} here", name="treegraft.extras")
sys.meta_path.insert(0, Blocked())
"""


def test_the_core_trains_without_extensions(tmp_path: Path) -> None:
    settings = tiny(run={"dir": str(tmp_path), "name": "alone", "num_updates": 1})
    code = f"""{BLOCKED}
from treegraft import train
from treegraft.core.registry import extensions
from treegraft.settings.config import known_settings
assert not extensions().entries and not extensions().problems
train({settings!r}, display=False)
print(len(known_settings()))
assert not [name for name in sys.modules if name.startswith("treegraft.extras")]
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) <= 260
    assert (tmp_path / "alone" / "trees" / "update-000001.jsonl.zst").exists()


def test_a_method_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    code = f"""{BLOCKED}
from treegraft import load_config
load_config("demo", ['explorers=["commit"]'])
"""
    said = run(code).stderr
    assert "explore.explorers: got 'commit', expected one of independent, entropy, graft" in said


# ---------------------------------------------------------------------- a package from outside


@pytest.mark.smoke
def test_an_extension_in_a_wheel_of_its_own_extends_a_run(tmp_path: Path, site: Path) -> None:
    """An explorer with settings and a check, a way to compare outcomes, a reward and a tracker,
    against the public face alone."""
    public = {"treegraft", "treegraft.parts"}
    assert set(re.findall(r"^ *(?:from|import) (treegraft[\w.]*)", MINE, re.M)) == public
    changes = {
        "run": {"dir": str(tmp_path), "name": "extended", "num_updates": 2},
        "explore": {"explorers": ["echo"], "echo": {"num": 2}, "num_leaves": 4},
        "reward": {"funcs": ["hierarchical", "short"]},
        "credit": {"advantage": "centred"},
        "track": {"trackers": ["lines"]},
    }
    code = f"from treegraft import train\ntrain({tiny(**changes)!r}, display=False)"
    done = run(code, site)
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "extended"
    assert (run_dir / "mine.txt").read_text().split() == ["0", "1", "2"]
    assert '"echo"' in "".join(map(tree_to_json, read_trees(run_dir)))
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["explore"]["echo"] == {"num_starts": 2, "num": 2}
    # It is gone: its recipes are refused by name, and nothing else is lost.
    code = f"from treegraft import load_config\nload_config({str(run_dir / 'config.json')!r})"
    assert "unknown setting 'credit.echo_share'" in run(code).stderr


@pytest.mark.smoke
def test_its_names_are_known_to_commands_errors_and_settings(site: Path) -> None:
    code, out = treegraft(["--help"], site)
    assert code == 0 and "hello" in out and "Say hello." in out
    assert treegraft(["hello", "--name", "tree"], site) == (0, "hello tree\n")
    code, out = treegraft(["config", "demo", 'explorers=["ech"]'], site)
    assert code == 2 and "Did you mean 'echo'?" in out
    code, out = treegraft(["config", "demo", 'explorers=["echo"]', "explore.echo.num=4"], site)
    assert code == 2 and "explore.echo.num: expected at most 3." in out
    code, out = treegraft(["config", "demo", "explore.echo.num=2"], site)
    assert code == 2 and "would have no effect" in out
    code, out = treegraft(["config", "explore.echo"], site)
    assert code == 0 and "Branches after each result." in out
    code, out = treegraft(["config", "credit.echo_share"], site)
    assert code == 0 and "Share of echoes." in out
    code, out = treegraft(["config", "echo/num"], site)
    assert code == 0 and "echoes of an update" in out
    code, out = treegraft(["config", "demo", 'explorers=["echo"]'], site, TREEGRAFT_PLUGINS="off")
    assert code == 2 and "got 'echo'" in out


def test_it_adds_a_command_below_eval_and_compares_its_folders(tmp_path: Path, site: Path) -> None:
    assert treegraft(["eval", "greetings", "--name", "tree"], site) == (0, "hello tree\n")
    assert "greetings" not in treegraft(["--help"], site)[1]
    for name, words in (("a", "one"), ("b", "three")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "words.txt").write_text(words)
    folders = [str(tmp_path / name) for name in ("a", "b")]
    assert treegraft(["compare", *folders, "--json"], site) == (0, "[3, 5] True\n")


def test_its_environment_is_opened_by_name(site: Path) -> None:
    code = """
from treegraft import load_config
from treegraft.tools.build import open_environments
config = load_config("demo", ["environment.kind=corridor"])
print([tool.name for tool in open_environments(config.environment).tools])
"""
    assert run(code, site).stdout.strip() == "['step']"


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import nowhere_to_be_found",
            "needs 'nowhere_to_be_found', which is not installed",
        ),
        ("1 / 0", "importing 'mine' failed: ZeroDivisionError: division by zero"),
        ("import sys; sys.exit()", "importing 'mine' failed: SystemExit"),
        ("register = 3", "it raised TypeError: 'int' object is not callable"),
        ("plugin = 3", "'mine:register': no 'register' in 'mine'."),
        (
            "def register(registry):\n    registry.reward('f1', 'a:b')",
            "it registers the reward 'f1', a name that 'treegraft' has taken",
        ),
        (
            "from treegraft.parts import ExplorerKind\n"
            "def register(registry):\n    registry.explorer('commit', ExplorerKind(make='a:b'))",
            "it registers the explorer 'commit', a name that 'treegraft.extras.methods.commit' has",
        ),
        (
            "def register(registry):\n"
            "    registry.reward('twice', 'a:b')\n    registry.reward('twice', 'a:c')",
            "it registers the reward 'twice', a name that 'mine' has taken",
        ),
        (
            "def register(registry):\n    registry.part('traker', 'lines', 'a:b')",
            "part 'lines': got seam 'traker', expected one of engine,",
        ),
        (
            "def register(registry):\n    1 / 0",
            "it raised ZeroDivisionError: division",
        ),
        (
            "from treegraft.parts import Settings, setting\n"
            "class Tables(Settings):\n    lr: float = setting(1.0)\n"
            "def register(registry):\n"
            "    registry.reward('mine', 'a:b', settings={'learn': Tables})",
            "'learn.lr' of mine is there already",
        ),
    ],
)
def test_an_extension_that_cannot_be_taken_is_one_sentence(
    source: str, said: str, tmp_path: Path
) -> None:
    folder = install(tmp_path / "site", source)
    code, out = treegraft(["config", "demo"], folder)
    words = " ".join(out.split())
    assert code == 2 and said in words and "mine" in words and "Traceback" not in out


def test_without_an_extension_that_cannot_be_taken_there_is_work(tmp_path: Path) -> None:
    folder = install(tmp_path / "site", "register = 3")
    assert treegraft(["--help"], folder)[0] == 0
    assert treegraft(["config", "demo"], folder, TREEGRAFT_PLUGINS="off")[0] == 0


def test_our_own_are_whole_and_take_no_name_of_the_core() -> None:
    assert extensions().problems == ()
    for seam, names in CORE_NAMES.items():
        assert not {*names} & {*registered(seam)}


def test_the_list_of_those_with_commands_is_right() -> None:
    bring = []
    for module in BUILT_IN:
        registry = Registry(module)
        importlib.import_module(module).register(registry)
        if any(entry.seam == "command" for entry in registry.entries):
            bring.append(module)
    assert list(WITH_COMMANDS) == bring
    assert registered_with_commands("command") == registered("command")


def test_an_import_path_that_leads_nowhere_is_told_when_it_is_used() -> None:
    assert Entry("reward", "mine", Registry).load() is Registry
    with raises_code("import-module-missing", match="no module 'nowhere'"):
        Entry("reward", "mine", "nowhere:thing").load()
