"""Extensions: written against `treegraft` and `treegraft.parts` alone; the core never imports
them."""

BUILT_IN = (
    "treegraft.extras.methods.aepo",
    "treegraft.extras.methods.appo",
    "treegraft.extras.methods.call_rewards",
    "treegraft.extras.methods.commit",
    "treegraft.extras.methods.dots.plugin",
    "treegraft.extras.methods.gigpo",
    "treegraft.extras.methods.prefix",
    "treegraft.extras.methods.tree_search",
    "treegraft.extras.browse.plugin",
    "treegraft.extras.environments.openenv.plugin",
    "treegraft.extras.environments.verifiers.plugin",
    "treegraft.extras.tasks.plugin",
    "treegraft.extras.mcp.plugin",
    "treegraft.extras.python.plugin",
    "treegraft.extras.search.plugin",
    "treegraft.extras.trackers",
    "treegraft.extras.suites.plugin",
    "treegraft.extras.teacher.plugin",
    "treegraft.extras.lab.plugin",
    "treegraft.extras.ray.plugin",
    "treegraft.extras.verl.plugin",
    "treegraft.extras.formats.plugin",
)
"""The modules of our own plugins, in the order in which they are loaded."""

WITH_COMMANDS = (
    "treegraft.extras.search.plugin",
    "treegraft.extras.suites.plugin",
    "treegraft.extras.lab.plugin",
    "treegraft.extras.ray.plugin",
    "treegraft.extras.verl.plugin",
)
"""Those of them that bring commands: the command line lists its commands without loading others."""
