"""What earlier versions had and this one has not, and what to use instead."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "track.prometheus": "It is gone since 0.8; use a tracker, or metrics.jsonl.",
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
