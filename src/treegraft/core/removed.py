"""What earlier versions had and this one has not, and what to use instead."""

from __future__ import annotations


def _world(name: str, called: str) -> dict[str, str]:
    """The entries of an environment that is an example now."""
    path = f"treegraft.examples.environments.{name}:{called}"
    since = f"Since 0.8 {called} is an example:"
    return {
        name: f'{since} write tasks.kind = "{path}Tasks" and environment.kind = "{path}", as its'
        f" recipe '{name}' does.",
        f"tasks.{name}": f'{since} with tasks.kind = "{path}Tasks" its options are entries of'
        " tasks.options.",
    }


REMOVED: dict[str, str] = {
    **_world("babyai", "BabyAI"),
    **_world("scienceworld", "ScienceWorld"),
    **_world("sokoban", "Sokoban"),
    **_world("textworld", "TextWorld"),
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
