"""The search tool: BM25 over a JSONL corpus of {"id", "contents"} rows (the format of FlashRAG and Search-R1)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re

import bm25s
import numpy as np

from treegraft.errors import DataError, SettingError, ToolError
from treegraft.interfaces import Capability, Signature
from treegraft.types import Task

NO_MATCH = "No passage matches the query."
"""What the agent reads when nothing was found."""
_WORDS = r"(?u)\b\w+\b"


class SearchTool:
    """Finds the passages of a corpus that best match a query, by BM25 (Lucene's variant)."""

    name = "search"
    description = "Searches a collection of texts and shows the passages that best match the query."
    signature = Signature.of_text("query", "What to look for.")
    capability = Capability.STATELESS
    cacheable = True

    def __init__(self, corpus: str, *, top_k: int = 3) -> None:
        """Reads and indexes the corpus.

        Args:
            corpus: path of the JSONL file; "~" and variables such as $TREEGRAFT_DATA are expanded.
            top_k: passages returned by one search, at most.

        Raises `SettingError` for an empty path and `DataError` for a missing file, a bad row or a corpus without words.
        """
        if not corpus.strip():
            raise SettingError("tools.search.corpus is empty; set it to a JSONL file of rows with 'id' and 'contents'.")
        self.path = os.path.expanduser(os.path.expandvars(corpus))
        self.top_k = top_k
        self._passages = _read(self.path)
        self._checksum = hashlib.sha256(json.dumps(self._passages).encode()).hexdigest()
        words = _words(self._passages)
        if not any(words):
            raise DataError(f"corpus '{self.path}': none of its {len(words)} rows contains a searchable word.")
        self._index = bm25s.BM25(method="lucene", backend="numpy")
        self._index.index(words, show_progress=False)

    @property
    def fingerprint(self) -> str:
        """What results depend on beside the query."""
        return f"bm25, top {self.top_k} of {self._checksum}"

    def __len__(self) -> int:
        """Returns the number of passages."""
        return len(self._passages)

    async def __call__(self, body: str, task: Task) -> str:
        """Returns one "Doc N: ..." line per passage, best first; equal scores in the order of the corpus.

        Raises `ToolError` for an empty query.
        """
        query = body.strip()
        if not query:
            raise ToolError("the search query is empty")
        return await asyncio.to_thread(self._search, query)

    async def close(self) -> None:
        """Nothing to release."""

    def _search(self, query: str) -> str:
        known = [word for word in _words([query])[0] if word in self._index.vocab_dict]
        if not known:
            return NO_MATCH
        scores = np.asarray(self._index.get_scores(known))
        found = [int(row) for row in _best(scores, self.top_k)]
        if not found:
            return NO_MATCH
        return "\n".join(f"Doc {rank}: {self._passages[row]}" for rank, row in enumerate(found, start=1))


def _best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Returns the rows of the `top_k` largest positive scores, best first, ties by row."""
    if top_k < len(scores):
        # Everything that ties with the last place stays in, so that the row and not the partition decides.
        threshold = np.partition(scores, -top_k)[-top_k]
        rows = np.flatnonzero((scores >= threshold) & (scores > 0))
    else:
        rows = np.flatnonzero(scores > 0)
    order = np.argsort(-scores[rows], kind="stable")
    return np.asarray(rows[order][:top_k])


def _words(texts: list[str]) -> list[list[str]]:
    words: list[list[str]] = bm25s.tokenize(texts, token_pattern=_WORDS, stopwords="en", return_ids=False, show_progress=False)
    return words


def _read(path: str) -> list[str]:
    """Returns the contents of all rows, each on one line."""
    unset = re.search(r"\$\{?\w+\}?", path)
    if not os.path.isfile(path):
        hint = f" The variable {unset.group()} is not set." if unset else " Check tools.search.corpus."
        raise DataError(f"corpus '{path}': there is no such file.{hint}")
    passages: list[str] = []
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    passages.append(_contents(line, f"corpus '{path}', line {number}"))
    except OSError as error:
        raise DataError(f"corpus '{path}': it cannot be read: {error.strerror}") from error
    if not passages:
        raise DataError(f'corpus \'{path}\': it has no rows; each line should be {{"id": ..., "contents": ...}}.')
    return passages


def _contents(line: bytes, place: str) -> str:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: not JSON ({error}).") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: got a JSON {type(row).__name__}, expected an object with 'id' and 'contents'.")
    for key, kinds in (("id", (str, int)), ("contents", (str,))):
        if key not in row:
            raise DataError(f"{place}: it has no '{key}'; it has {', '.join(sorted(row)) or 'no keys'}.")
        if not isinstance(row[key], kinds):
            raise DataError(f"{place}: '{key}' is {type(row[key]).__name__}, expected {kinds[0].__name__}.")
    return " ".join(row["contents"].split())
