"""The search tool, and search over a corpus of one's own: by words (BM25) or by meaning (dense)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from treegraft.core.errors import ToolError
from treegraft.core.interfaces import Capability, Signature
from treegraft.core.types import Task
from treegraft.tools.search.corpus import Corpus, Passage, checksum, corpus_path, read_rows
from treegraft.tools.search.home import SMALL_BYTES, find_or_make, index_home

NO_MATCH = "No passage matches the query."
"""What the agent reads when nothing was found."""


class SearchBackend(Protocol):
    """Where passages come from."""

    is_remote: bool
    """Whether a service elsewhere answers, so that calls are retried and their rate is limited."""

    @property
    def fingerprint(self) -> str:
        """What results depend on beside the query."""
        ...

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns for each query its best passages, best first, `top_k` at most.

        Raises `ToolUnavailable` where the service behind it is down, and `ToolError` for a query
        that it refuses.
        """
        ...

    async def close(self) -> None: ...


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
            BM25 over it. top_k: passages returned by one search, at most.

        Raises what `open_corpus` raises.
        """
        self.backend: SearchBackend = open_corpus(source) if isinstance(source, str) else source
        self.top_k = top_k

    @property
    def is_remote(self) -> bool:
        """Whether a service elsewhere answers."""
        return self.backend.is_remote

    @property
    def fingerprint(self) -> str:
        """What results depend on beside the query."""
        return f"{self.backend.fingerprint}, top {self.top_k}"

    async def __call__(self, body: str, task: Task) -> str:
        """Returns one "Doc N: ..." line per passage, best first; equal scores in the order of the
        corpus.

        Raises `ToolError` for an empty query, and what the backend raises.
        """
        query = body.strip()
        if not query:
            raise ToolError("the search query is empty")
        (found,) = await self.backend.search([query], self.top_k)
        lines = [
            f"Doc {rank}: {' '.join(passage.contents.split())}"
            for rank, passage in enumerate(found, start=1)
        ]
        return "\n".join(lines) or NO_MATCH

    async def close(self) -> None:
        """Closes the backend."""
        await self.backend.close()


def open_corpus(
    corpus: str,
    kind: Literal["bm25", "dense"] = "bm25",
    *,
    encoder: str = "minilm",
    index_dir: str = "",
) -> CorpusSearch:
    """Returns a search over a JSONL file of {"id", "contents"} rows; its index is made where there
    is none.

    A BM25 index of a corpus of up to 64 MiB is made anew each time, which takes seconds; others are
    kept (see `index_home`).

    Args:
        encoder: for "dense", as in [tools.search].
        index_dir: where indexes are kept; empty for beside the corpus.

    Raises:
        SettingError: an empty path, an unknown encoder, or a place that cannot be written to.
        DataError: a missing file, a bad row or a corpus without words.
        ModelError: an encoder that cannot be loaded.
    """
    path = corpus_path(corpus)
    index = (
        _open_dense(path, encoder, index_dir) if kind == "dense" else _open_lexical(path, index_dir)
    )
    return CorpusSearch(
        Corpus(path, index.offsets), index, f"dense by {encoder}" if kind == "dense" else "bm25"
    )


def _open_lexical(path: Path, index_dir: str) -> PassageIndex:
    from treegraft.tools.search.lexical import FORMAT, LexicalIndex

    if path.stat().st_size <= SMALL_BYTES:
        return LexicalIndex.build(read_rows(path), path)
    home = index_home(path, "bm25", index_dir)
    recipe = {"kind": "bm25", "format": FORMAT}
    return LexicalIndex.load(
        find_or_make(
            path,
            home,
            recipe,
            lambda folder: LexicalIndex.build(read_rows(path), path).save(folder),
        )
    )


def _open_dense(path: Path, encoder: str, index_dir: str) -> PassageIndex:
    from treegraft.tools.search.dense import FORMAT, DenseIndex
    from treegraft.tools.search.encoders import build_encoder

    made = build_encoder(encoder, keeps="beginning")
    home = index_home(path, "dense", index_dir)
    recipe = {"kind": "dense", "format": FORMAT, "encoder": made.name, "dim": made.dim}
    return DenseIndex(
        find_or_make(
            path, home, recipe, lambda folder: DenseIndex.build(read_rows(path), folder, made)
        ),
        made,
    )


@dataclass(frozen=True, slots=True)
class _Question:
    queries: list[str]
    top_k: int
    answer: asyncio.Future[list[list[Passage]]]


class CorpusSearch:
    """Search over a corpus in this process: what is asked while a search is under way is answered
    together after it."""

    is_remote = False

    def __init__(self, corpus: Corpus, index: PassageIndex, kind: str) -> None:
        """Takes over both, and closes them.

        Args:
            kind: how is searched, for the fingerprint.
        """
        self._corpus, self._index, self._kind = corpus, index, kind
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")
        self._waiting: list[_Question] = []
        self._worker: asyncio.Task[None] | None = None

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
        loop = asyncio.get_running_loop()
        # A loop that is over took its worker and those who waited with it.
        if self._worker is not None and self._worker.get_loop() is not loop:
            self._waiting, self._worker = [], None
        question = _Question(list(queries), top_k, loop.create_future())
        self._waiting.append(question)
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        return await question.answer

    async def close(self) -> None:
        """Ends the thread, once the search under way is done, and closes the files."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._index.close()
        self._corpus.close()

    async def _work(self) -> None:
        try:
            while self._waiting:
                # Those who gave up meanwhile are not searched for.
                batch, self._waiting = [one for one in self._waiting if not one.answer.done()], []
                try:
                    found = await asyncio.get_running_loop().run_in_executor(
                        self._thread, self._answer, batch
                    )
                except Exception as error:  # each call that asked fails by it
                    for question in batch:
                        if not question.answer.done():
                            question.answer.set_exception(error)
                    continue
                for question, passages in zip(batch, found, strict=True):
                    if not question.answer.done():
                        question.answer.set_result(passages)
        finally:
            self._worker = None

    def _answer(self, batch: Sequence[_Question]) -> list[list[list[Passage]]]:
        answers: list[list[list[Passage]]] = [[] for _ in batch]
        # How many are wanted decides how many are looked at, so only equals are asked together.
        for top_k in {question.top_k for question in batch}:
            places = [place for place, question in enumerate(batch) if question.top_k == top_k]
            found = iter(
                self._index.search(
                    [query for place in places for query in batch[place].queries], top_k
                )
            )
            for place in places:
                for _ in batch[place].queries:
                    rows, scores = next(found)
                    answers[place].append(
                        self._corpus.read(
                            [int(row) for row in rows], [float(score) for score in scores]
                        )
                    )
        return answers
