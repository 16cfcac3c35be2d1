"""Extensions: written against `treegraft` and `treegraft.parts` alone; the core never imports
them."""

BUILT_IN = (
    "treegraft.extras.methods.aepo",
    "treegraft.extras.methods.appo",
    "treegraft.extras.methods.axpo",
    "treegraft.extras.methods.commit",
    "treegraft.extras.methods.dots.plugin",
    "treegraft.extras.methods.gigpo",
    "treegraft.extras.methods.prefix",
    "treegraft.extras.methods.tree_search",
    "treegraft.extras.environments.openenv.plugin",
    "treegraft.extras.environments.scienceworld.plugin",
    "treegraft.extras.environments.sokoban.plugin",
    "treegraft.extras.environments.verifiers.plugin",
    "treegraft.extras.trackers.plugin",
    "treegraft.extras.lab.plugin",
    "treegraft.extras.ray.plugin",
)
"""The modules of our own plugins, in the order in which they are loaded."""
