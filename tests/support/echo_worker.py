"""Repeats what it is asked, in a child process of `core.workers`. Run by file path, never
imported."""

from __future__ import annotations


def answer(request: str) -> str:
    """Returns the request."""
    return request
