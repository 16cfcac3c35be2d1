"""Checks the English of the pages by ten rules.

    python docs/prose.py               # all pages
    python docs/prose.py PAGE ...      # these alone
    python docs/prose.py --count       # findings and sentences of every page

Code, tables and headings have no sentences; the words of a table's cells are looked at by the rules
about phrases. `<!-- prose: RULE, REASON -->` before a paragraph excepts it from a rule. The exit
code is 1 after a finding.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
MAX_LINE, MAX_P90, MAX_WORDS, MAX_PARAGRAPH = 120, 28, 45, 130

RULES = {
    "line": f"a line of the source has more than {MAX_LINE} characters (tables and links excepted)",
    "p90": f"nine of ten sentences of a page have fewer than {MAX_P90} words",
    "long": f"a sentence has more than {MAX_WORDS} words",
    "paragraph": f"a paragraph has more than {MAX_PARAGRAPH} words",
    "inversion": "a sentence turns subject and verb around",
    "chain": "'of these', 'of them', 'of those' or a chain of 'those of' instead of a noun",
    "where": "a sentence or a further clause begins with 'where' for 'if' or 'when'",
    "riddle": "a phrase says less than its words",
    "semicolons": "a sentence has more than one semicolon",
    "filler": "a word says nothing",
}

DO = r"(?:do|does|is|are|has|have|can|did|was|were)"
PHRASES = {
    "inversion": rf"^(?:So|Nor|Neither) (?:it |they )?{DO}\b|\band so {DO}\b|, as {DO} \w+"
    r"|^(?:Also|Only|Not|Never|Here)(?: \w+)? (?:does|do|stands?|goes|comes?)\b",
    "chain": r"\bof (?:these|them|those)\b|^(?:Of|From|With) (?:these|those|them|each|which)\b"
    r"|\b(?:those|that) of\b.*\b(?:those|that) of\b",
    "where": r"(?-i:^Where)\b|(?: and| or|;) where\b",
    "riddle": rf"\bas (?:many|much|few) (?:\S+ )?as there {DO}\b|\bis what it was\b"
    r"|\bc[ao]me about\b|\bas (?:it|they) (?:does|do|is|are) with\b|\b(?:is|are) to be \w+ed\b"
    r"|\bto be had\b|\bwhat is what\b",
    "filler": r"\b(?:simply|obviously|basically|actually|in order to|of course|quite"
    r"|needless to say|it should be noted|(?:please )?note that|as it were|so to speak)\b",
}

EXCEPTIONS = {
    "docs/warnings.md": {
        "line": "python docs/build.py --warnings writes it, an item a line",
        "semicolons": "likely causes are a list after a colon",
    }
}
"""Page -> rule -> reason why the whole page is excepted."""


class Finding(NamedTuple):
    """One breach of a rule."""

    page: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.rule}: {self.text}"


class Block(NamedTuple):
    """A paragraph, an item of a list or a cell of a table."""

    line: int
    text: str
    is_cell: bool
    exceptions: frozenset[str]


_FENCE = re.compile(r"^(\s*)(```|~~~)")
_EXCEPTION = re.compile(r"<!-- prose: (\w+), (\S.*) -->")
_ITEM = re.compile(r"^\s*(?:[-*+]|\d+\.)\s+")
_END = re.compile(r"(?<=[.!?])(?:[\"')\]]*)\s+(?=[\"'(\[]*[A-Z0-9])")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|vs|al|No|eq|eqs|Fig|sec)\.$")


def blocks(page: str) -> Iterator[Block]:
    """Yields what of a page is written in sentences."""
    open_at, gathered, is_code = 0, [], False
    exceptions: set[str] = set()

    def closed() -> Iterator[Block]:
        if gathered:
            text = " ".join(" ".join(gathered).split())
            yield Block(open_at, text, False, frozenset(exceptions))
            exceptions.clear()
        gathered.clear()

    lines = page.splitlines()
    start = lines.index("---", 1) + 1 if lines[:1] == ["---"] else 0
    for number, line in enumerate(lines[start:], start + 1):
        if _FENCE.match(line):
            yield from closed()
            is_code = not is_code
        elif is_code:
            continue
        elif excepted := _EXCEPTION.match(line):
            yield from closed()
            exceptions.add(excepted[1])
        elif not line.strip() or line.startswith(("#", "<", "    ", "![")):
            if not (gathered and line.startswith("    ")):  # a formula, unless it goes on an item
                yield from closed()
            else:
                gathered.append(line)
        elif line.startswith("|"):
            yield from closed()
            for cell in re.split(r"(?<!\\)\|", line.strip("|")):
                yield Block(number, " ".join(cell.split()), True, frozenset(exceptions))
        else:
            if _ITEM.match(line):
                yield from closed()
            open_at = open_at if gathered else number
            gathered.append(_ITEM.sub("", line))
    yield from closed()


def plain(text: str) -> str:
    """Returns text without markup: a link's words, CODE for inline code."""
    text = re.sub(r"``.+?``|`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\*\*|<[^>]+>", "", text)


def sentences(text: str) -> list[str]:
    """Returns the sentences of a paragraph without markup."""
    found: list[str] = []
    for part in _END.split(plain(text)):
        if found and _ABBREVIATION.search(found[-1]):
            found[-1] += f" {part}"
        else:
            found.append(part)
    return [one.strip() for one in found if one.strip()]


def num_words(sentence: str) -> int:
    """Returns the number of words with a letter or digit in them."""
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def p90(counts: list[int]) -> int:
    """Returns the smallest count that nine of ten counts do not exceed."""
    return sorted(counts)[-(-9 * len(counts) // 10) - 1] if counts else 0


def findings(name: str, page: str) -> list[Finding]:
    """Returns every breach of a rule on a page, in the order of its lines."""
    found = [
        Finding(name, number, "line", f"{len(line)} characters: {line[:60]}")
        for number, line in _lines_of_prose(page)
        if len(line) > MAX_LINE and not re.search(r"\S{100}", line)
    ]
    counts: list[int] = []
    for block in blocks(page):
        said = sentences(block.text)
        if not block.is_cell:
            counts += [num_words(one) for one in said]
        found += [
            Finding(name, block.line, rule, text)
            for rule, text in _of_block(block, said)
            if rule not in block.exceptions
        ]
    if p90(counts) >= MAX_P90:
        found.append(Finding(name, 1, "p90", f"{p90(counts)} words, expected under {MAX_P90}"))
    kept = [one for one in found if one.rule not in EXCEPTIONS.get(name, {})]
    return sorted(kept, key=lambda one: one.line)


def _lines_of_prose(page: str) -> Iterator[tuple[int, str]]:
    """The lines that are no row of a table and no code."""
    is_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if _FENCE.match(line):
            is_code = not is_code
        elif not is_code and not line.startswith(("|", "<")):
            yield number, line


def _of_block(block: Block, said: list[str]) -> Iterator[tuple[str, str]]:
    if not block.is_cell and sum(map(num_words, said)) > MAX_PARAGRAPH:
        yield "paragraph", f"{sum(map(num_words, said))} words: {said[0][:60]}"
    for sentence in said:
        if not block.is_cell and num_words(sentence) > MAX_WORDS:
            yield "long", f"{num_words(sentence)} words: {sentence}"
        if not block.is_cell and sentence.count(";") > 1:
            yield "semicolons", sentence
        for rule, phrase in PHRASES.items():
            if re.search(phrase, sentence, re.IGNORECASE):
                yield rule, sentence


def pages() -> dict[str, str]:
    """Returns the text of every page that is written by hand, by its path in the repository."""
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    # The log and the list of changes are records; the list of files is made from docstrings.
    own = [one for one in files if not one.name.startswith(("LOG", "CHANGELOG", "files"))]
    return {str(one.relative_to(ROOT)): one.read_text(encoding="utf-8") for one in sorted(own)}


def main(arguments: list[str]) -> int:
    """Prints the findings of the pages asked for; returns the exit code."""
    every = pages()
    if arguments == ["--count"]:
        for name, page in every.items():
            said = [
                one for block in blocks(page) if not block.is_cell for one in sentences(block.text)
            ]
            print(
                f"{name:<28} findings {len(findings(name, page)):>4}   sentences {len(said):>4}   "
                f"p90 {p90([num_words(one) for one in said]):>3}"
            )
        return 0
    found = [one for name in arguments or every for one in findings(name, every[name])]
    for one in found:
        print(f"{one}  ({RULES[one.rule]})")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
