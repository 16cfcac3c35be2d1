"""Settings of the environment that trajectories act in."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from treegraft.settings import Settings


class EnvironmentSettings(Settings):
    """Settings of the environment; without a kind there is none."""

    kind: str = ""
    """What each trajectory gets one of: an import path "package.module:Class" (TRL's convention: `reset(**row)`, public methods
    as tools, `get_reward()`), "openenv" (a session of an OpenEnv server), "verifiers" (an episode of a verifiers environment), or
    empty for none."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class; for "openenv" url, tool, tools, reset, reward and timeout_s; for "verifiers" taskset,
    settings, env and tool."""
    capability: Literal["auto", "fork", "replay", "none"] = "auto"
    """How a tree branches over its state: "fork" copies the object (its own `fork()`, else a deep copy), "replay" re-executes the
    calls on a fresh one and compares every result, "none" refuses; "auto" is what the class declares."""
    max_replay_calls: int = Field(20, ge=0)
    """Longest history that a branch re-executes, in calls; steps behind more calls do not branch."""
    deadline_s: float = Field(60.0, gt=0)
    """Longest wait for making and resetting, copying, or asking for the reward, in seconds; calls have tools.deadline_s."""
    success_reward: float = 1.0
    """Environment reward from which the trajectory of a task without a reference counts as correct."""
