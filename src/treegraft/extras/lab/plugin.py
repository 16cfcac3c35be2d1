"""The commands of studies, reports and profiles, and the memory of several GPUs."""

from __future__ import annotations

from treegraft.parts import Command, Plugin

_HERE = "treegraft.extras.lab"
plugin = Plugin(
    name="lab",
    examinations={"memory": f"{_HERE}.sizing:memory"},
    commands={
        "report": Command(
            path=f"{_HERE}.report_command:report",
            help="Write a report of runs: report.html and figures/.",
        ),
        "study": Command(
            path=f"{_HERE}.study_command:study",
            help="Run a study: arms in worlds, in pairs of equal seeds.",
        ),
        "buffer prune": Command(
            path=f"{_HERE}.pruning.command:prune_app",
            help="Write a buffer without the steps that did not help the steps after them.",
        ),
        "buffer show": Command(
            path=f"{_HERE}.pruning.command:show",
            help="Print stored trajectories, and a pruned buffer's cut steps and weights of steps.",
        ),
        "profile": Command(
            path=f"{_HERE}.profile_command:profile",
            help="Run a few updates of a recipe and print the time of each part.",
        ),
    },
)
