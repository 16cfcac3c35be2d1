"""Settings of tools and environments."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Capability
from treegraft.settings.table import Settings, has, setting, when

S = TypeVar("S", bound=Settings)


class SearchToolSettings(Settings):
    """Settings of the search tool."""

    kind: str = setting("bm25", seam="search")
    """The source of passages, which extensions bring: "bm25" and "dense" search a corpus of your
    own, "http" asks a server that speaks Search-R1's retrieve protocol (such as `treegraft serve
    search`), "web" a search engine; or the import path of a class or function, called with this
    table."""
    # Search-R1's and RAPO's.
    top_k: int = setting(3, ge=1, le=1000)
    """Passages returned by one search."""


class ToolsSettings(Settings):
    use: list[str] = setting([], seam="tool")
    """"search", names that extensions bring ("python", "browse"), or import paths
    "package.module:function"; the tasks' own tools are always on."""
    # A search or a short program ends well before; the trajectory waits for it.
    deadline_s: float = setting(30.0, gt=0)
    """Longest wait for one call, in seconds; past it the agent reads that the call timed out."""
    # A page would fill the context of a small model.
    max_output_chars: int = setting(2000, ge=16)
    """Output cap of one call, in characters."""
    cache: bool = True
    """Answer repeated calls of cacheable tools from memory; errors are never stored."""
    cache_path: str = setting("", acts="writes", idle_unless=when("tools.cache"))
    """SQLite file with results of cacheable tools and a fingerprint; variables are expanded;
    empty for none."""
    max_concurrent: int = setting(16, ge=1)
    """Calls under way at once."""
    search: SearchToolSettings = setting(
        SearchToolSettings(), idle_unless=has("tools.use", "search")
    )


class EnvironmentSettings(Settings):
    """Settings of the environment; without a kind there is none."""

    kind: str = setting("", seam="environment")
    """The environment that each trajectory gets one of: an import path "package.module:Class"
    (TRL's convention: `reset(**row)`, public methods as tools, `get_reward()`), "openenv" (a
    session of an OpenEnv server), "verifiers" (an episode of a verifiers environment), or empty
    for none."""
    options: dict[str, Any] = setting({}, acts="imports")
    """Keyword arguments of the class; for "openenv" url, tool, tools, reset, reward and timeout_s;
    for "verifiers" taskset, settings, env and tool."""
    capability: Literal["auto", "fork", "replay", "none"] = "auto"
    """How a tree branches over its state: "fork" copies the object (its own `fork()`, else a deep
    copy), "replay" re-executes the calls on a fresh one and compares every result, "none" refuses;
    "auto" is the class's own declaration."""
    deadline_s: float = setting(60.0, gt=0)
    """Longest wait for making and resetting, copying, or asking for the reward, in seconds; calls
    have tools.deadline_s."""

    def capability_without_fork(self, reason: str) -> Capability:
        """Returns the capability of environments that cannot be copied; "none" unless declared.

        Raises `SettingError`, with the reason, if the settings ask for copies.
        """
        if self.capability == "fork":
            raise SettingError(
                f"environment.capability: got 'fork', but {reason}; expected 'replay'.",
                code="no-fork",
            )
        return Capability.NONE if self.capability == "auto" else Capability(self.capability)

    def options_as(self, table: type[S]) -> S:
        """Returns `options` as a table. Raises `SettingError` for wrong ones."""
        try:
            return table(**self.options)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}"
                for one in error.errors(include_url=False)
            )
            raise SettingError(
                f'environment.options: for "{self.kind}": {faults}. It takes'
                f" {', '.join(table.model_fields)}.",
                code="environment-options-invalid",
            ) from error


class AgentSettings(Settings):
    run: str | list[str] = setting("", acts="runs")
    """An agent that owns its loop and samples through an OpenAI-compatible server on the loopback:
    an import path "package.module:function" of `async def agent(task, client)`, or a command as a
    list of strings, which finds the server in OPENAI_BASE_URL and OPENAI_API_KEY and the task as
    JSON in TASK. The result, a command's last line, may be {"answer": ..., "reward": ...}. Empty:
    Treegraft's own loop."""
