"""What verl imports in each of its processes, by the entry point group `verl.plugins`: it makes the
trainer known by its name."""

from __future__ import annotations

from importlib.metadata import version

from treegraft.extras.verl import SUPPORTED

# verl hides what a plugin raises; of other versions the name stays unknown, and `verl-args` says
# why.
if version("verl").split("+")[0] == SUPPORTED:
    from treegraft.extras.verl import trainer as trainer
