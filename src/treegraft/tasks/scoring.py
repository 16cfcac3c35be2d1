"""Comparing an answer with its reference: exact match, SQuAD's F1, and mathematics.

A reference is one accepted answer or a sequence of them; the best counts. "Correct" (`is_correct`)
means an exact match or equal mathematics, never a share of words.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

from treegraft.core.packages import is_installed, require
from treegraft.tasks.math_pool import shared_pool

DEADLINE_S = 5.0
"""Longest comparison of two pieces of mathematics, in processor seconds; past it they count as not
equal."""
MAX_MATH_CHARS = 2000
"""Longer texts are compared as strings only: no answer is that long, and parsing time grows faster
than length."""

_ARTICLES = re.compile(r"\b(a|an|the)\b", re.UNICODE)
_PUNCTUATION = frozenset(string.punctuation)
_CLOSED_ANSWERS = ("yes", "no", "noanswer")

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
_RATIO = re.compile(r"([+-]?\d+)\s*/\s*(\d+)")
_RANGE = re.compile(r"\d+(\s*[-:]\s*\d+)+")
_NAME = re.compile(r"[A-Za-z]\d+")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
_LATEX = re.compile(r"\\|\^|_\{")
_EXPRESSION = re.compile(r"[0-9A-Za-z+\-*/^=<>().,\[\]{}|!\s°√≤≥]+")
_NEGATIVE_POWER = re.compile(r"\^\s*(-(?:\d+(?:\.\d+)?|[A-Za-z]))")
_OPERATOR = re.compile(r"[+*/^=<>()\[\]{}|√≤≥-]|\d[A-Za-z!]|,")
_FUNCTIONS = {
    "sin",
    "cos",
    "tan",
    "cot",
    "arcsin",
    "arccos",
    "arctan",
    "log",
    "ln",
    "exp",
    "sqrt",
    "abs",
    "max",
    "min",
    "mod",
}
_WRAPPINGS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), (r"\boxed{", "}"))
_CHARACTERS = str.maketrans(
    {
        "\N{MINUS SIGN}": "-",
        "\N{EN DASH}": "-",
        "\N{MULTIPLICATION SIGN}": "*",
        "\N{MIDDLE DOT}": "*",
        "\N{DIVISION SIGN}": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
    }
)


_CHOICE = re.compile(r"\(?([A-Za-z])(?:\)|\.|\):|:)?")
"""The letter of a choice, as in multiple-choice questions: D, (D), D."""
_IDEOGRAPH = re.compile(
    r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f]"
)
_IDEOGRAPHIC_PUNCTUATION = str.maketrans(
    dict.fromkeys(
        "\u3001\u3002\u300a\u300b\u300c\u300d\u300e\u300f\u3010\u3011\u201c\u201d\u2018\u2019\u00b7\u2014\u2026",
        " ",
    )
)
"""Chinese and Japanese marks that have no full-width counterpart in ASCII."""


def exact_match(prediction: str, reference: str | Sequence[str]) -> float:
    """Returns 1.0 where the prediction is the reference after SQuAD's normalisation, else 0.0.

    Four departures, because SQuAD's normalisation was made for English words: numbers, LaTeX and
    expressions keep their punctuation ("-5" is not "5", "2x+1" is not "2x-1"); so do numbers inside
    text ("1.95 m" is not "195 m") and the sharp of a letter ("C#" is not "C"); texts that normalise
    to nothing ("A") are compared as they are; and in texts with Chinese or Japanese characters
    full-width forms and that script's punctuation and spaces count as in English ones.
    """
    if not isinstance(reference, str):
        return max((exact_match(prediction, one) for one in reference), default=0.0)
    chosen = _CHOICE.fullmatch(prediction.strip())
    right = _CHOICE.fullmatch(reference.strip())
    if chosen and right:
        return float(chosen[1].casefold() == right[1].casefold())
    if is_mathematical(reference) or is_mathematical(prediction):
        return float(_same_text(prediction, reference))
    # Only where both have such characters: a Latin answer keeps SQuAD's rules.
    is_spaced = bool(_IDEOGRAPH.search(prediction) and _IDEOGRAPH.search(reference))
    predicted = _normalise_text(prediction, is_spaced)
    expected = _normalise_text(reference, is_spaced)
    if not predicted or not expected:
        return float(_same_text(prediction, reference))
    return float(predicted == expected)


def _normalise_text(text: str, is_spaced: bool) -> str:
    text = _TEXT_COMMAND.sub(r"\1", text)
    return _normalise_squad(_protect_numbers(_spaced(text) if is_spaced else text))


def exact_match_squad(prediction: str, reference: str | Sequence[str]) -> float:
    """Returns 1.0 for an exact match by SQuAD v1.1's evaluation script (arXiv 1606.05250),
    else 0.0."""
    expected = map(_normalise_squad, _as_references(reference))
    return float(_normalise_squad(prediction) in expected)


def f1(prediction: str, reference: str | Sequence[str]) -> float:
    """Returns the F1 of the bags of words, 0..1, by SQuAD v1.1's evaluation script (arXiv
    1606.05250).

    Words are split at white space, in lower case, without punctuation and the articles a, an,
    the. Texts without a common word have 0.
    """
    if not isinstance(reference, str):
        return max((f1(prediction, one) for one in reference), default=0.0)
    predicted = _normalise_squad(prediction).split()
    expected = _normalise_squad(reference).split()
    num_same = sum((Counter(predicted) & Counter(expected)).values())
    # Precision and recall would be 0 of 0 for two empty texts.
    if num_same == 0:
        return 0.0
    precision = num_same / len(predicted)
    recall = num_same / len(expected)
    return 2 * precision * recall / (precision + recall)


def f1_characters(prediction: str, reference: str | Sequence[str]) -> float:
    """Returns `f1`, with each Chinese or Japanese character a word of its own, as CMRC 2018's
    evaluation has it.

    Such texts have no spaces, so that `f1` would find one word and score 0 or 1. Without them it is
    `f1`.
    """
    return f1(_spaced(prediction), [_spaced(one) for one in _as_references(reference)])


def f1_papers(prediction: str, reference: str | Sequence[str]) -> float:
    """Returns F1 as ARPO's released reward takes it (arXiv 2507.19849).

    That is `f1`, except that yes, no and noanswer, on either side, score 0 unless both sides are
    the same.
    """
    if not isinstance(reference, str):
        return max((f1_papers(prediction, one) for one in reference), default=0.0)
    predicted = _normalise_squad(prediction)
    expected = _normalise_squad(reference)
    if predicted != expected and (predicted in _CLOSED_ANSWERS or expected in _CLOSED_ANSWERS):
        return 0.0
    return f1(prediction, reference)


def math_equal(
    prediction: str, reference: str | Sequence[str], *, deadline_s: float = DEADLINE_S
) -> bool:
    """Returns whether both mean the same mathematics: "1/2" and "0.5", "x+1" and "1+x", but not
    "(3,4)" and "(4,3)". Without brackets, "1,-2" and "-2,1" are the same solutions.

    Plain numbers are compared as fractions: exactly, but decimals to six digits (math-verify
    rounds to six decimals). Other answers go to math-verify in a worker process; past
    `deadline_s` processor seconds the result is False. If nothing can be parsed, or the reference
    is no mathematics (`is_mathematical`), normalised strings are compared: as products of
    symbols, "listen" would equal "silent".

    Raises:
        TreegraftError: math-verify is not installed, or the worker process cannot be started.
    """
    if not isinstance(reference, str):
        return any(math_equal(prediction, one, deadline_s=deadline_s) for one in reference)
    # The cheap comparisons come first; most pairs never reach a process.
    if max(len(prediction), len(reference)) > MAX_MATH_CHARS:
        return prediction.strip() == reference.strip()
    predicted = _unwrap(prediction)
    expected = _unwrap(reference)
    if not predicted or not expected:
        return False
    # Most right answers are: no process is asked.
    if predicted == expected:
        return True
    a = _as_fraction(predicted)
    b = _as_fraction(expected)
    if a is not None and b is not None:
        if "." not in predicted + expected or a.denominator == b.denominator == 1:
            return a == b
        size = max(abs(a), abs(b))
        # The second term is the rounding of double precision, for results that a program printed.
        return abs(a - b) <= max(min(Fraction(1), size) / 10**6, size / 10**14)
    if _normalise_math(prediction) == _normalise_math(reference):
        return True
    if not is_mathematical(reference):
        return _same_text(prediction, reference)
    # As inline mathematics; of a bare text math-verify would take the last number in it.
    require("comparing mathematics", "math_verify")
    one, other = (text if "$" in text else f"${text}$" for text in (predicted, expected))
    # "unparsed" leaves the strings, which differ.
    return shared_pool().compare(one, other, deadline_s) == "equal"


def is_correct(prediction: str, reference: str | Sequence[str]) -> bool:
    """Returns whether the prediction matches exactly or is equal mathematics; never by F1.

    Raises:
        TreegraftError: the worker process that compares mathematics cannot be started.
    """
    return exact_match(prediction, reference) == 1.0 or math_equal(prediction, reference)


def is_mathematical(reference: str) -> bool:
    """Returns whether the text is a number, LaTeX, or an expression such as "2x + 1"; words and
    dates are not."""
    cleaned = _unwrap(reference) if len(reference) <= MAX_MATH_CHARS else ""
    if not cleaned:
        return False
    if _as_fraction(cleaned.rstrip("%").strip()) is not None:
        return True
    outside = _TEXT_COMMAND.sub("", cleaned)
    if outside != cleaned:
        return bool(_LATEX.search(outside) or re.search(r"\d", outside))
    if _LATEX.search(cleaned):
        return True
    # "1990-95" is a range of years and "R2" a name, although both are made of an expression's
    # characters.
    if not _EXPRESSION.fullmatch(cleaned) or _RANGE.fullmatch(cleaned) or _NAME.fullmatch(cleaned):
        return False
    # Single letters are variables; any longer word but a function's name makes it a text.
    for word in re.findall(r"[A-Za-z]+", cleaned):
        if len(word) > 1 and word.lower() not in _FUNCTIONS:
            return False
    return bool(_OPERATOR.search(cleaned))


def require_math(references: Iterable[str]) -> None:
    """Raises `SettingError` where a reference is mathematical and math-verify is not installed."""
    unsure = () if is_installed("math_verify") else references
    for reference in filter(is_mathematical, unsure):
        require(f"comparing answers with mathematics, such as '{reference}',", "math_verify")


def _as_references(reference: str | Sequence[str]) -> tuple[str, ...]:
    return (reference,) if isinstance(reference, str) else tuple(reference)


def _spaced(text: str) -> str:
    """Sets characters of scripts without spaces apart, and writes their punctuation as ASCII; other
    texts stay as they are."""
    if not _IDEOGRAPH.search(text):
        return text
    text = unicodedata.normalize("NFKC", text).translate(_IDEOGRAPHIC_PUNCTUATION)
    return _IDEOGRAPH.sub(lambda match: f" {match[0]} ", text)


def _normalise_squad(text: str) -> str:
    text = "".join(character for character in text.lower() if character not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def _same_text(prediction: str, reference: str) -> bool:
    if max(len(prediction), len(reference)) > MAX_MATH_CHARS:
        return prediction.strip() == reference.strip()
    expected = _normalise_math(reference).casefold()
    return bool(expected) and _normalise_math(prediction).casefold() == expected


def _protect_numbers(text: str) -> str:
    """Spells the signs and points of numbers, and the sharp of a single letter, as letters, so that
    removing punctuation leaves them."""
    text = _THOUSANDS.sub("", text.translate(_CHARACTERS))
    # C# and F# minor are other names than C and F minor.
    text = re.sub(r"(?<![A-Za-z0-9])([A-Za-z])#", r"\1sharp", text)
    # Not inside a word or a number, where it is a hyphen ("covid-19") or a range.
    text = re.sub(r"(?<![\w.])-(?=\.?\d)", "minus", text)
    return re.sub(r"(?<=\d)([.,:/-])(?=\d)", lambda match: f"sep{ord(match[1])}sep", text)


def _unwrap(text: str) -> str:
    """Returns the text without \\boxed{}, dollar signs or brackets of mathematics around it, and a
    final full stop."""
    before = None
    text = text.translate(_CHARACTERS).replace("**", "^").replace(r"\$", "").strip()
    # Without braces, TeX raises the sign alone.
    text = _NEGATIVE_POWER.sub(r"^{\1}", text)
    # Until nothing changes: wrappings nest, as in $\\boxed{5}.$
    while text != before:
        before = text
        text = text.removesuffix(".").strip()
        for start, end in _WRAPPINGS:
            inner = text[len(start) : -len(end)]
            if text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end):
                is_whole = _is_balanced(inner) if start == r"\boxed{" else start not in inner
                text = inner.strip() if is_whole else text
    return text.removeprefix("$").strip() if text.count("$") == 1 else text


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text.replace(r"\{", "").replace(r"\}", ""):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def _normalise_math(text: str) -> str:
    """Returns the text with the spellings of LaTeX that mean the same made one, for comparison as a
    string.

    In the manner of the MATH benchmark's equivalence (arXiv 2103.03874), but units and left-hand
    sides stay.
    """
    text = _THOUSANDS.sub("", _unwrap(text))
    text = _TEXT_COMMAND.sub(r"\1", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    # TeX takes single digits without braces: \\frac12 is one half.
    text = re.sub(r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac\s*\{(-?\w+)\}\s*\{(\w+)\}", r"\1/\2", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"_\{(\d+|\w)\}", r"_\1", text)
    text = re.sub(r"\\(?:left|right|big|Big|displaystyle)(?![A-Za-z])|\\[!,;: ]", "", text)
    text = re.sub(r"\^\s*\{?\\circ\}?|°", "", text)
    # .5 is 0.5, 2.50 is 2.5, and 3. is 3.
    text = re.sub(r"(?<![\d.])\.(?=\d)", "0.", text)
    text = re.sub(r"(\d\.\d*?)0+(?!\d)", r"\1", text)
    text = re.sub(r"(?<=\d)\.(?!\d)", "", text)
    # Between letters or digits a space is a boundary ("1 2" is not "12"); elsewhere it is only
    # layout.
    return re.sub(r"(?<!\w)\s+|\s+(?!\w)", "", " ".join(text.split()))


def _as_fraction(text: str) -> Fraction | None:
    """Returns a plain number ("-1,000", "2.5", "3/4", "1e6") as a fraction; None for anything
    else."""
    text = _THOUSANDS.sub("", text)
    ratio = _RATIO.fullmatch(text)
    if ratio:
        return Fraction(int(ratio[1]), int(ratio[2])) if int(ratio[2]) else None
    return Fraction(text) if _NUMBER.fullmatch(text) else None
