"""Answers: what is compared with the reference, read off the text that the agent gave as its
answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:[eE][-+]?\d{1,3}(?!\w)|\s?/\s?\d+)?"
)
"""-5, 1,000, 2.50, .5, 1e6 and 3/4; neither the 2 of "R2" nor the full stop behind a number."""
_FRACTION = re.compile(r"\\[dtc]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_LAYOUT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\b|\\[^A-Za-z]")
_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "$": " ", "*": " "})


@dataclass(frozen=True, slots=True)
class AnswerRule:
    """The rule of `format.answer`, which has the meaning of each kind.

    AnswerRule("regex", r"Answer: (.*)")
    """

    kind: str = "auto"
    pattern: str = ""
    """Of "regex"."""
    finds_numbers: bool = False
    """"auto" is the last number of a sentence if a reference is a number."""

    @property
    def looks_for_box(self) -> bool:
        """Whether the text in a \\boxed{} is the answer, if there is one."""
        return self.kind in ("auto", "boxed")

    def read(self, text: str, reference: Sequence[str]) -> str | None:
        """Returns the answer in a text; None where this rule finds none.

        Args:
            reference: the accepted answers, as far as known.
        """
        match self.kind:
            case "last_number":
                return last_number(text)
            case "regex":
                found = list(re.finditer(self.pattern, text))
                groups = [one for one in found[-1].groups() if one is not None] if found else []
                return (groups[0] if groups else found[-1][0]).strip() if found else None
            case "auto" if self.finds_numbers and any(map(_is_number, reference)):
                # An expression such as 40 + 6 or \sqrt{4} is left to the comparison.
                return (last_number(text) if _is_prose(text) else None) or text
        return text


def last_number(text: str) -> str | None:
    """Returns the last number of a text, "1000" of "about 1,000 km."; None where it has none."""
    plain = _FRACTION.sub(r" \1/\2 ", text.translate(_SIGNS))
    found = _NUMBER.findall(plain)
    return re.sub(r"[,\s]", "", found[-1]) if found else None


def _is_number(text: str) -> bool:
    return _NUMBER.fullmatch(text.translate(_SIGNS).strip()) is not None


def _is_prose(text: str) -> bool:
    """Whether a text is more than one expression: words, an equation, several lines."""
    rest = _LAYOUT.sub(" ", _FRACTION.sub(" ", text.strip()))
    return "\\" not in rest and re.search(r"[^\W\d_]{2,}|=|\n", rest) is not None
