"""Search over a local corpus, by words (BM25) or by meaning (dense)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treegraft.extras.search.corpus import Corpus, checksum, corpus_path, read_rows
from treegraft.extras.search.home import SMALL_BYTES, find_or_make, index_home
from treegraft.parts import Batcher, build_encoder, errors, interfaces, packages


def corpus_search(search: Any) -> CorpusSearch:
    """Returns the search that [tools.search] asks for. Raises as `open_corpus`."""
    with errors.about("tools.search.corpus"):
        return open_corpus(
            search.corpus, search.kind, encoder=search.encoder, index_dir=search.index_dir
        )


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
    if kind == "dense":
        return _open_dense(path, encoder, index_dir)
    packages.require("tools.search.kind = 'bm25'", "bm25s")
    from treegraft.extras.search import lexical

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


def _open_dense(path: Path, encoder: str, index_dir: str) -> CorpusSearch:
    from treegraft.extras.search import dense

    # A passage begins with its title, which must not be cut off.
    with errors.about("tools.search.encoder"):
        made = build_encoder(encoder, keeps="beginning")
    recipe = {"kind": "dense", "format": dense.FORMAT, "encoder": made.name, "dim": made.dim}
    # A folder may be trained further; the encoders with a name of ours stay as they are.
    weights = [checksum(one) for one in sorted(Path(made.name).rglob("*.safetensors"))]
    if weights:
        recipe["weights"] = weights
    folder = find_or_make(
        path,
        index_home(path, "dense", index_dir),
        recipe,
        lambda folder: dense.DenseIndex.build(read_rows(path), folder, made),
    )
    index = dense.DenseIndex(folder, made)
    name = " ".join(["dense by", encoder, *weights])
    return CorpusSearch(Corpus(path, index.offsets), index, name)


class CorpusSearch:
    """Search over a corpus in this process; queries that arrive during a search are answered
    together after it."""

    is_remote = False

    def __init__(self, corpus: Corpus, index: Any, kind: str) -> None:
        """Takes over both, and closes them.

        Args:
            kind: the kind of search, for the fingerprint.
        """
        self._corpus = corpus
        self._index = index
        self._kind = kind
        self._batcher = Batcher(self._answer, "search")

    @functools.cached_property
    def fingerprint(self) -> str:
        """Kind and checksum of the corpus, which is read once for it."""
        return f"{self._kind} over {checksum(self._corpus.path)}"

    def __len__(self) -> int:
        """Returns the number of passages."""
        return len(self._corpus)

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[interfaces.Passage]]:
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

    def _answer(
        self, batch: Sequence[tuple[Sequence[str], int]]
    ) -> list[list[list[interfaces.Passage]]]:
        answers: list[list[list[interfaces.Passage]]] = [[] for _ in batch]
        # The number wanted decides how many candidates are looked at, so only equals are asked
        # together.
        for top_k in {wanted for _, wanted in batch}:
            places: list[int] = []
            asked: list[str] = []
            for place, (queries, wanted) in enumerate(batch):
                if wanted == top_k:
                    places += [place] * len(queries)
                    asked += queries
            found = self._index.search(asked, top_k)
            for place, (rows, scores) in zip(places, found, strict=True):
                answers[place].append(self._corpus.read(rows.tolist(), scores.tolist()))
        return answers
