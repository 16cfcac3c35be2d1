"""The passages of a page that match a query; also imported by the processes that read pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

GAP = "[...]"
"""In place of passages that were left out."""


def choose(text: str, query: str, num: int, max_chars: int) -> list[str]:
    """Returns the `num` best passages of at most `max_chars` characters in their order, with `GAP`
    where others stood; empty where there is no text."""
    # All at once: BM25 counts words over the whole page.
    passages = list(cut(text, max_chars))
    shown = []
    last = -1
    for number in most_relevant(passages, query, num):
        if number != last + 1:
            shown.append(GAP)
        shown.append(passages[number])
        last = number
    if last + 1 < len(passages):
        shown.append(GAP)
    return shown


def cut(text: str, max_chars: int) -> Iterator[str]:
    """Yields the text in pieces of at most `max_chars` characters, cut at ends of paragraphs,
    sentences or words."""
    piece = ""
    for part in _parts(text, max_chars):
        if piece and len(piece) + 1 + len(part) > max_chars:
            yield piece
            piece = ""
        piece = f"{piece} {part}" if piece else part
    if piece:
        yield piece


def _parts(text: str, max_chars: int) -> Iterator[str]:
    for line in text.splitlines():
        # Chinese sentences end without a space behind them.
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[。！？])", " ".join(line.split())):
            begin = 0
            while len(sentence) - begin > max_chars:
                # A space just behind the limit ends a word too.
                space = sentence.rfind(" ", begin, begin + max_chars + 1)
                end = space if space > begin else begin + max_chars
                yield sentence[begin:end]
                # Words stand one space apart by now.
                begin = end + (sentence[end] == " ")
            if begin < len(sentence):
                yield sentence[begin:]


def most_relevant(passages: list[str], query: str, num: int) -> list[int]:
    """Returns the numbers of the passages that match the query best by BM25, ascending; the first
    ones if none does."""
    import bm25s

    first_ones = list(range(min(num, len(passages))))
    # The pattern of bm25s drops words of one character, such as the number in "Apollo 8".
    cut_up = partial(
        bm25s.tokenize, token_pattern=r"(?u)\b\w+\b", stopwords="en", show_progress=False
    )
    words = cut_up(passages)
    if not words.vocab:
        return first_ones
    # A backend by name, so that results do not depend on whether numba is installed.
    bm25 = bm25s.BM25(method="lucene", backend="numpy")
    bm25.index(words, create_empty_token=False, show_progress=False)
    (asked,) = cut_up([query], return_ids=False)
    scores = bm25.get_scores_from_ids(bm25.get_tokens_ids(asked))
    best_first = sorted(range(len(passages)), key=lambda number: -scores[number])
    return sorted(number for number in best_first[:num] if scores[number] > 0) or first_ones
