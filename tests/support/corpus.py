"""A corpus for the search tool, made of recorded web searches."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TREEGRAFT_DATA") or ROOT.parent / "shared" / "data")
"""Public test and training sets; tests that need them are skipped where the folder is missing."""

_PAGE = re.compile(r"^Page \d+:\s*", re.M)


def write_corpus(path: Path) -> Path:
    """Writes one row per recorded page to a JSONL file and returns its path."""
    searches = json.loads((DATA / "rl" / "search_cache.json").read_text(encoding="utf-8"))
    with path.open("w", encoding="utf-8") as file:
        for number, found in enumerate(searches.values()):
            pages = [page.strip() for page in _PAGE.split(found)]
            for rank, contents in enumerate(page for page in pages if page):
                file.write(
                    json.dumps({"id": f"{number}/{rank}", "contents": contents}, ensure_ascii=False)
                    + "\n"
                )
    return path
