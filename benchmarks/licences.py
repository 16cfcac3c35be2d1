"""The licences of what the core requires, and of all that this requires in turn.

    python -m benchmarks.licences

Each package is printed with its licence as its metadata state it; a licence that is not permissive
is refused. It looks at what is installed: run it where the core is.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads(
    (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
)["project"]
PERMISSIVE = {
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "CNRI-Python",
    "ISC",
    "MIT",
    "PSF-2.0",
    "Zlib",
}
"""By their names in SPDX's list."""
SPELLINGS = {
    "Apache": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
}
"""What older metadata call them."""
EXCEPTIONS = {
    "certifi": "MPL-2.0: a list of certificates, used as it is",
    "tqdm": "MPL-2.0 AND MIT: used as it is; the licence binds changes to its own files alone",
}
"""Packages that may be required although their licence is not permissive, and why."""
OF_CUDA = ("cuda-", "nvidia-")
"""How the names of NVIDIA's libraries begin: builds of torch for CUDA bring them, those for the CPU
need none."""


def same(name: str) -> str:
    """Returns a distribution's name as all its spellings have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the distributions that requirements bring here, those that these bring
    included."""
    asked = [(Requirement(one), frozenset[str]()) for one in requirements]
    done: set[tuple[str, frozenset[str]]] = set()
    while asked:
        requirement, extras = asked.pop()
        marker = requirement.marker
        key = (same(requirement.name), frozenset(requirement.extras))
        applies = marker is None or any(marker.evaluate({"extra": one}) for one in extras | {""})
        if applies and key not in done:
            done.add(key)
            asked += [(Requirement(one), key[1]) for one in metadata.requires(key[0]) or ()]
    return {name for name, _ in done}


def required() -> set[str]:
    """Returns the names of all distributions that the core alone brings."""
    return closure(PROJECT["dependencies"])


def licence(package: str) -> str:
    """Returns the licence that a distribution's metadata state; "" where they state none."""
    found = metadata.metadata(package)
    heads = [one for one in found.get_all("Classifier") or () if one.startswith("License ::")]
    named = " AND ".join(one.rpartition(" :: ")[2] for one in heads)
    stated = [found[head] for head in ("License-Expression", "License") if head in found]
    # Some have the whole text there.
    stated = [one for one in stated if "\n" not in one]
    return str(next(filter(None, stated), named))


def is_permissive(text: str) -> bool:
    """Returns whether all parts of a licence are permissive; of alternatives one is enough, unless
    they are nested in parentheses."""
    is_nested = "(" in text
    ways = re.sub(r"[()]", "", text).split(" OR ")
    ways = [" AND ".join(ways)] if is_nested else ways
    return any(
        all(SPELLINGS.get(part, part) in PERMISSIVE for part in way.split(" AND ")) for way in ways
    )


def refused(packages: Iterable[str]) -> list[str]:
    """Returns a sentence for each package whose licence is not permissive and that is no
    exception."""
    known = ", ".join(sorted(PERMISSIVE))
    return [
        f"{name}: got the licence '{licence(name)}', expected one of {known}"
        for name in sorted(packages)
        if not (name in EXCEPTIONS or name.startswith(OF_CUDA) or is_permissive(licence(name)))
    ]


def main() -> int:
    """Prints the licences; returns 1 where one is refused."""
    packages = required()
    for name in sorted(packages):
        note = f" ({EXCEPTIONS[name]})" if name in EXCEPTIONS else ""
        print(f"{name} {metadata.version(name)}: {licence(name)}{note}")
    wrong = refused(packages)
    print("\n".join(wrong) or f"{len(packages)} packages, all of them permissive or excepted")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
