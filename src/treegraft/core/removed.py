"""What earlier versions had and this one has not, and what to use instead."""

from __future__ import annotations

_FORCED = "Gone since 0.8; 'commit' (docs/methods.md) begins answers and calls in failed groups."
_PAIRS = "Gone since 0.8; loss.graft_coef imitates openings that paid, with 'commit'."
_EVIDENCE = "Gone since 0.8; credit.attribution = 'states' (GiGPO) compares steps in a state."
_PRICE = "Gone since 0.8; the report counts the tokens read and written."

REMOVED: dict[str, str] = {
    "answer_leaf": _FORCED,
    "continuation": _FORCED,
    "counterfactual": _FORCED,
    "credit.evidence": _EVIDENCE,
    "evidence": _EVIDENCE,
    "explore.answer_leaf": _FORCED,
    "explore.continuation": _FORCED,
    "explore.counterfactual": _FORCED,
    "explore.first_tokens": _FORCED,
    "first_tokens": _FORCED,
    "loss.pair_beta": _PAIRS,
    "loss.pair_coef": _PAIRS,
    "buffer.build.price_read": _PRICE,
    "buffer.build.price_written": _PRICE,
}
"""By the name of an explorer, a kind or an objective ("answer_leaf"), or the dotted name of a
setting or of a table of settings ("explore.answer_leaf"): a sentence that says since when it is
gone and what takes its place."""


def instead(name: str) -> str:
    """Returns the sentence for a name, or for the table it belongs to, with a space before it; an
    empty string if no version had it."""
    while name:
        if sentence := REMOVED.get(name):
            return f" {sentence}"
        name = name.rpartition(".")[0]
    return ""
