"""Known holes of what is installed: `make audit`.

    python -m benchmarks.audit PIP_AUDIT

It asks PyPI's database about the pinned versions (constraints.txt) and about the lowest ones that
pyproject.toml allows. Exit codes: 0 no known hole; 1 a hole; 3 the database could not be asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UNREACHED = 3
_BOUND = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*(?:>=|==|~=)\s*([0-9][0-9.]*)")


def _bounds(requirements: Iterable[str]) -> dict[str, str]:
    found = (_BOUND.match(one) for one in requirements)
    # "1.16.*" is any version of 1.16.
    return {one[1].lower(): one[2].rstrip(".") for one in found if one is not None}


def floors() -> dict[str, str]:
    """Returns the lowest version of each package that pyproject.toml allows, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for some in project["optional-dependencies"].values() for one in some]
    return _bounds([*project["dependencies"], *extras])


def pins() -> dict[str, str]:
    """Returns the versions of constraints.txt."""
    return _bounds((ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines())


def asked(command: str, versions: dict[str, str], path: Path) -> tuple[list[str], list[str]]:
    """Returns a line for each known hole, and the packages that the database was not asked about.

    Args:
        command: pip-audit.
        path: where the list of versions is written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name}=={one}\n" for name, one in sorted(versions.items())))
    words = [command, "-r", str(path), "--no-deps", "--disable-pip", "--format", "json"]
    words += ["--progress-spinner", "off", "--timeout", "20"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        answers = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        return [], sorted(versions)
    holes = [
        f"{one['name']} {one['version']}: {hole['id']}, fixed in"
        f" {', '.join(hole['fix_versions']) or 'no version'}"
        for one in answers
        for hole in one.get("vulns", ())
    ]
    return holes, [one["name"] for one in answers if "skip_reason" in one]


def main(command: str) -> int:
    """Prints what is known, and returns the exit code."""
    code = 0
    for title, versions in (("pins", pins()), ("floors", floors())):
        holes, left_out = asked(command, versions, ROOT / "build" / "audit" / f"{title}.txt")
        num_asked = len(versions) - len(left_out)
        print(f"{title}: {len(holes)} known holes in {num_asked} of {len(versions)} packages")
        print("".join(f"  {line}\n" for line in holes), end="")
        if left_out:
            print(f"  not asked about: {', '.join(left_out)}")
        code = 1 if holes else max(code, UNREACHED if not num_asked else 0)
    if code == UNREACHED:
        print("The database could not be asked; docs/security.md lists what was checked by hand.")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
