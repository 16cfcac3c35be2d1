"""The examples as modules, such as treegraft.examples.environments.sokoban, in a clone and in a
wheel alike."""

from treegraft.core.shipped import shipped

# What makes a module a package: where the modules below it are looked for.
__path__ = [str(shipped("examples"))]
