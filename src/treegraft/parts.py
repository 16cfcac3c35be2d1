"""What people who write extensions, or loops of their own, build on.

Together with `treegraft` itself this is all that is promised to them; other modules may move.
Examples for each name: docs/parts.md.
"""

from __future__ import annotations

from treegraft.core.lazy import homes, loader

_HOMES = homes(__file__)
__all__ = sorted(_HOMES)
__getattr__ = loader("treegraft.parts", _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
