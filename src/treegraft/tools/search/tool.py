"""The search tool, and search over a local corpus: by words (BM25) or by meaning (dense)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from treegraft.core.batches import Batcher
from treegraft.core.errors import ToolError, about
from treegraft.core.interfaces import Capability, Passage, SearchBackend, Signature
from treegraft.core.packages import require
from treegraft.core.types import Task
from treegraft.tools.search.corpus import Corpus, checksum, corpus_path, read_rows
from treegraft.tools.search.home import SMALL_BYTES, find_or_make, index_home

NO_MATCH = "No passage matches the query."
"""The tool's result when nothing was found."""


class PassageIndex(Protocol):
    """Rows of a corpus by query; called from one thread at a time."""

    @property
    def offsets(self) -> npt.NDArray[np.uint64]: ...

    def search(
        self, queries: Sequence[str], top_k: int
    ) -> list[tuple[npt.NDArray[np.int64], Any]]: ...

    def close(self) -> None: ...


class SearchTool:
    """Finds the passages that best match a query."""

    name = "search"
    description = "Searches a collection of texts and shows the passages that best match the query."
    signature = Signature.of_text("query", "What to look for.")
    capability = Capability.STATELESS
    cacheable = True

    def __init__(self, source: SearchBackend | str, *, top_k: int = 3) -> None:
        """Args:
            source: where passages come from, closed with the tool; the path of a corpus stands for
                BM25 over it.
            top_k: passages returned by one search, at most.

        Raises the errors of `open_corpus`.
        """
        self.backend: SearchBackend = open_corpus(source) if isinstance(source, str) else source
        self.top_k = top_k

    @property
    def is_remote(self) -> bool:
        """Whether a service elsewhere answers."""
        return self.backend.is_remote

    @property
    def fingerprint(self) -> str:
        """Names everything but the query that results depend on."""
        return f"{self.backend.fingerprint}, top {self.top_k}"

    async def __call__(self, body: str, task: Task) -> str:
        """Returns one "Doc N: ..." line per passage, best first; equal scores in the order of the
        corpus.

        Raises `ToolError` for an empty query, and the errors of the backend.
        """
        query = body.strip()
        if not query:
            raise ToolError("the search query is empty", code="query-empty")
        (found,) = await self.backend.search([query], self.top_k)
        # One line per passage, so that the agent can tell where the next begins.
        lines = [
            f"Doc {rank}: {' '.join(passage.contents.split())}"
            for rank, passage in enumerate(found, start=1)
        ]
        return "\n".join(lines) or NO_MATCH

    async def close(self) -> None:
        """Closes the backend."""
        await self.backend.close()


def open_corpus(
    corpus: str, kind: str = "bm25", *, encoder: str = "minilm", index_dir: str = ""
) -> CorpusSearch:
    """Returns a search over a JSONL file of {"id", "contents"} rows; a missing index is built.

    A BM25 index of a corpus of up to 64 MiB is built each time, in seconds. Larger indexes are
    stored (see `index_home`).

    Args:
        encoder: for "dense", as in [tools.search].
        index_dir: folder of stored indexes; empty means the folder of the corpus.

    Raises:
        SettingError: an empty path, an unknown encoder, or a folder that cannot be written to.
        DataError: a missing file, a bad row or a corpus without words.
        ModelError: an encoder that cannot be loaded.
    """
    path = corpus_path(corpus)
    index: PassageIndex
    if kind == "dense":
        from treegraft.tools.search import dense, encoders

        # A passage begins with its title, which must not be cut off.
        with about("tools.search.encoder"):
            made = encoders.build_encoder(encoder, keeps="beginning")
        recipe = {"kind": kind, "format": dense.FORMAT, "encoder": made.name, "dim": made.dim}
        # A folder may be trained further; the encoders with a name of ours stay as they are.
        weights = [checksum(one) for one in sorted(Path(made.name).rglob("*.safetensors"))]
        folder = find_or_make(
            path,
            index_home(path, kind, index_dir),
            recipe | ({"weights": weights} if weights else {}),
            lambda folder: dense.DenseIndex.build(read_rows(path), folder, made),
        )
        index = dense.DenseIndex(folder, made)
        told = " ".join(["dense by", encoder, *weights])
        return CorpusSearch(Corpus(path, index.offsets), index, told)
    require("tools.search.kind = 'bm25'", "bm25s")
    from treegraft.tools.search import lexical

    if path.stat().st_size <= SMALL_BYTES:
        index = lexical.LexicalIndex.build(read_rows(path), path)
    else:
        folder = find_or_make(
            path,
            index_home(path, kind, index_dir),
            {"kind": kind, "format": lexical.FORMAT},
            lambda folder: lexical.LexicalIndex.build(read_rows(path), path).save(folder),
        )
        index = lexical.LexicalIndex.load(folder)
    return CorpusSearch(Corpus(path, index.offsets), index, kind)


class CorpusSearch:
    """Search over a corpus in this process; queries that arrive during a search are answered
    together after it."""

    is_remote = False

    def __init__(self, corpus: Corpus, index: PassageIndex, kind: str) -> None:
        """Takes over both, and closes them.

        Args:
            kind: the kind of search, for the fingerprint.
        """
        self._corpus, self._index, self._kind = corpus, index, kind
        self._batcher = Batcher(self._answer, "search")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Kind and checksum of the corpus, which is read once for it."""
        return f"{self._kind} over {checksum(self._corpus.path)}"

    def __len__(self) -> int:
        """Returns the number of passages."""
        return len(self._corpus)

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns for each query its best passages.

        Raises:
            ToolUnavailable: the corpus was changed meanwhile.
        """
        return await self._batcher.ask((queries, top_k))

    async def close(self) -> None:
        """Ends the thread, once the search under way is done, and closes the files."""
        # Before the files: the search under way still reads them.
        await asyncio.to_thread(self._batcher.close)
        self._index.close()
        self._corpus.close()

    def _answer(self, batch: Sequence[tuple[Sequence[str], int]]) -> list[list[list[Passage]]]:
        answers: list[list[list[Passage]]] = [[] for _ in batch]
        # The number wanted decides how many candidates are looked at, so only equals are asked
        # together.
        for top_k in {wanted for _, wanted in batch}:
            asked = [
                (place, query)
                for place, (queries, wanted) in enumerate(batch)
                if wanted == top_k
                for query in queries
            ]
            found = self._index.search([query for _, query in asked], top_k)
            for (place, _), (rows, scores) in zip(asked, found, strict=True):
                answers[place].append(self._corpus.read(rows.tolist(), scores.tolist()))
        return answers
