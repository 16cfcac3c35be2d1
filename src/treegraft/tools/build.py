"""From the names in a recipe to tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from treegraft.core.errors import SettingError
from treegraft.core.import_paths import blaming
from treegraft.core.interfaces import EnvironmentKind, Tool
from treegraft.core.registry import find, registered
from treegraft.settings.tools import EnvironmentSettings, ToolsSettings
from treegraft.tools.environments.own import OVER, ClassEnvironments, EnvironmentTool, ended
from treegraft.tools.function import FunctionTool


def build_tools(settings: ToolsSettings, own: Sequence[Tool]) -> list[Tool]:
    """Returns the tasks' own tools, then those of `settings.use` in its order, then those of MCP
    servers.

    Raises `SettingError` for an unknown name, an import path that leads to no tool, and two tools
    of one name; errors of a tool's own settings (`DataError` for a search corpus) pass through.
    """
    tools = list(own)
    origins = dict.fromkeys((tool.name for tool in own), "the tasks bring a tool of that name")
    for entry in settings.use:
        found = find(entry, TOOLS, "tool", "tools.use")
        tool: Tool = _as_tool(found, entry) if ":" in entry else found(settings)
        if tool.name in origins:
            raise SettingError(
                f"tools.use: '{entry}' gives a tool named '{tool.name}', but {origins[tool.name]}.",
                code="tools-same-name",
            )
        tools.append(tool)
        origins[tool.name] = "it is there already"
    for name, toolset in registered("toolset").items():
        if asked := getattr(settings, name, None):
            tools += toolset.load()(asked, taken=origins)
    return tools


def words_of(tools: Sequence[Tool]) -> list[str]:
    """Returns the words that tools add to a closed vocabulary: their tags, and those that tell the
    end of an episode."""
    tags = [f"<{slash}{tool.name}>" for tool in tools for slash in ("", "/")]
    has_end = any(isinstance(tool, EnvironmentTool) for tool in tools)
    return [*tags, *(f"{ended('')} {OVER}".split() if has_end else ())]


def open_environments(settings: EnvironmentSettings) -> EnvironmentKind | None:
    """Returns the kind of a recipe's environments, None without one; no environment is started.

    Raises:
        SettingError: an import path that leads to no environment, or a server or package that
            is missing.
    """
    if not settings.kind:
        return None
    found = find(settings.kind, {}, "environment", "environment.kind")
    if ":" not in settings.kind:
        kind: EnvironmentKind = found(settings)
        return kind
    # A class needs no trial object: its methods can be read.
    if isinstance(found, type):
        return ClassEnvironments(found, settings.kind, settings)
    if not callable(found):
        raise SettingError(
            f"environment.kind: '{settings.kind}' is a {type(found).__name__}; expected a class, or"
            " a function that makes an environment.",
            code="environment-invalid",
        )
    with blaming(settings.kind, "environment.kind"):
        # The tools are the methods of its class, which only an object tells.
        first = found(**settings.options)
    return ClassEnvironments(type(first), settings.kind, settings, maker=found)


def _search(settings: ToolsSettings) -> Tool:
    from treegraft.tools.search.tool import search_tool

    return search_tool(settings.search)


TOOLS: Mapping[str, Callable[[ToolsSettings], Tool]] = {"search": _search}


def _as_tool(found: Any, entry: str) -> Tool:
    if isinstance(found, type):  # a class of the user's with the attributes of a tool
        try:
            found = found()
        except TypeError as error:
            raise SettingError(
                f"tools.use: the class '{entry}' cannot be made without arguments: {error}",
                code="tool-not-made",
            ) from error
    # Before callables: a tool is one too.
    if isinstance(found, Tool):
        return found
    if callable(found):
        return FunctionTool(found)
    raise SettingError(
        f"tools.use: '{entry}' is a {type(found).__name__}; expected a function or a tool.",
        code="tool-invalid",
    )
