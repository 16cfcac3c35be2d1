"""The wording of a search world: symbols for a word-level tokenizer, English for language models.

                symbols                 English
    question    r5 of r2 of e9 ?        Who is the cousin of the best friend of Nora?
    query       e9 r2                   best friend of Nora
    fact        r2 of e9 is e41         The best friend of Nora is Ruben.
    thought     (none)                  I need the best friend of Nora first.
    error       unknown                 There is no relation "uncle"; the relations are teacher, ...

A wording only names things: which entity a relation leads to is the world's affair, and the same in
both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Protocol

from treegraft.core.errors import ToolError

UNKNOWN: Final = "unknown"
"""The whole text of an error in symbols: a word-level tokenizer knows no other words."""

_NAMES: Final = """
Mira Tomas Ines Ruben Clara Oscar Nora Felix Lena Hugo Emma Simon Julia Victor Alice Martin Sara
Daniel Eva Leo Anna Peter Laura Adam Rosa Paul Maria Jonas Helen David Sofia Lucas Iris Walter
Olga Marco Linda Henry Diana Robert Carmen Philip Amelia George Ruth Edward Vera Thomas Elena
Arthur Marta Louis Judith Samuel Bella Patrick Greta Oliver Nadia Albert Stella Frank Ivan Yara
Abel Agnes Basil Bruno Cyrus Della Dora Edith Elias Ezra Flora Gavin Gloria Harold Hilda Ida
Jasper Joan Karl Klara Lydia Magnus Mabel Milo Nina Otto Pablo Rita Ronan Silas Thea Wanda
"""
NAMES: Final = tuple(_NAMES.split())
"""Entities in English: one word each, no two alike, none a number or an article."""

RELATIONS: Final = (
    *("teacher", "neighbour", "best friend", "boss", "doctor", "cousin", "coach", "partner"),
    *("tutor", "lawyer", "dentist", "landlord", "mentor", "rival", "roommate", "driver"),
)
"""Relations in English. Any person can be any other's, so that a random fact is no odd one."""

_EDGES: Final = " \t\n\"'\u2018\u2019\u201c\u201d.,;:!?"
_OPENING: Final = re.compile(r"^(?:who|what)(?: is|['\u2019]s) ")
_FACT: Final = re.compile(r"The (.+) of (.+) is (.+)\.")


class Wording(Protocol):
    """What a search world needs to say and to understand. Relations go in the order in which they
    are looked up."""

    @property
    def entities(self) -> tuple[str, ...]: ...

    @property
    def relations(self) -> tuple[str, ...]: ...

    @property
    def description(self) -> str:
        """The search tool's part of the system prompt."""
        ...

    @property
    def example(self) -> str:
        """A question of two hops, for error texts."""
        ...

    def question(self, relations: Sequence[str], entity: str) -> str: ...

    def read_question(self, text: str) -> tuple[list[str], str] | None:
        """Returns relations and entity, or None for a text that is no question about this world."""
        ...

    def query(self, entity: str, relation: str) -> str:
        """Returns what the agent writes to the search tool."""
        ...

    def read_query(self, body: str) -> tuple[str, str]:
        """Returns entity and relation.

        Raises:
            ToolError: the body is not one known entity and one known relation.
        """
        ...

    def fact(self, entity: str, relation: str, found: str) -> str:
        """Returns what the search tool answers."""
        ...

    def read_fact(self, text: str) -> str | None:
        """Returns the entity that the answer of a search names, or None for another text."""
        ...

    def thought(self, entity: str, relation: str, *, is_last: bool) -> str:
        """Returns the expert's thought before a search."""
        ...

    @property
    def last_thought(self) -> str:
        """The expert's thought before the answer; it says nothing that an early answer would not
        say."""
        ...

    def vocabulary(self) -> tuple[str, ...]:
        """Returns every word for a word-level tokenizer; empty for open language."""
        ...


@dataclass(frozen=True)
class Symbols:
    """Symbols(("e0", "e1", ...), ("r0", "r1", ...)): one token a word, and not one word more than
    needed."""

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    description: str = 'Looks up one fact. Write an entity and a relation, e.g. "e9 r2".'
    example: str = "r5 of r2 of e9 ?"
    last_thought: str = ""

    def question(self, relations: Sequence[str], entity: str) -> str:
        """Returns the outermost relation first, e.g. "r5 of r2 of e9 ?"."""
        return " of ".join([*reversed(relations), entity]) + " ?"

    def read_question(self, text: str) -> tuple[list[str], str] | None:
        """Returns relations and entity, or None for a text that is no question about this world."""
        *relations, entity = text.strip().removesuffix("?").strip().split(" of ")
        if (
            not relations
            or entity not in self.entities
            or not set(relations) <= set(self.relations)
        ):
            return None
        return relations[::-1], entity

    def query(self, entity: str, relation: str) -> str:
        """Returns e.g. "e9 r2"."""
        return f"{entity} {relation}"

    def read_query(self, body: str) -> tuple[str, str]:
        """Returns entity and relation. Raises ToolError for anything but one of each, in this
        order."""
        words = body.split()
        if len(words) != 2 or words[0] not in self.entities or words[1] not in self.relations:
            raise ToolError(UNKNOWN)
        return words[0], words[1]

    def fact(self, entity: str, relation: str, found: str) -> str:
        """Returns e.g. "r2 of e9 is e41"."""
        return f"{relation} of {entity} is {found}"

    def read_fact(self, text: str) -> str | None:
        """Returns the entity that a search found, or None for another text."""
        words = text.split()
        return words[4] if len(words) == 5 and words[3] == "is" else None

    def thought(self, entity: str, relation: str, *, is_last: bool) -> str:
        """Returns no thought: the agent's vocabulary has no words for one."""
        return ""

    def vocabulary(self) -> tuple[str, ...]:
        """Returns every word of questions, results, errors and answers."""
        return (*self.relations, *self.entities, "of", "?", "is", UNKNOWN)


@dataclass(frozen=True)
class English:
    """English(("Mira", "Tomas", ...), ("teacher", "neighbour", ...)): persons and what they are to
    each other.

    Reading forgives what a language model varies: case, spaces, line breaks, articles, quotes,
    punctuation at the ends and an opening "Who is".
    """

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    last_thought: str = "That answers the question."
    _known: Mapping[str, str] = field(init=False, repr=False, compare=False)
    """Each name and relation by its lower-case form."""

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "_known", {word.casefold(): word for word in (*self.entities, *self.relations)}
        )

    @property
    def description(self) -> str:
        """The search tool's part of the system prompt."""
        return (
            "Looks up one fact about a person. Write one relation and one name, e.g."
            f' "{self._sample}".'
        )

    @property
    def example(self) -> str:
        """A question of two hops, for error texts."""
        return self.question(self.relations[:2], self.entities[0])

    @property
    def _sample(self) -> str:
        return self.query(self.entities[0], self.relations[0])

    def question(self, relations: Sequence[str], entity: str) -> str:
        """Returns the outermost relation first, e.g. "Who is the cousin of the best friend of
        Nora?"."""
        return (
            "Who is "
            + " of ".join([*(f"the {relation}" for relation in reversed(relations)), entity])
            + "?"
        )

    def read_question(self, text: str) -> tuple[list[str], str] | None:
        """Returns relations and entity, or None for a text that is no question about this world."""
        *relations, entity = self._parts(text)
        if (
            not relations
            or entity not in self.entities
            or not set(relations) <= set(self.relations)
        ):
            return None
        return relations[::-1], entity

    def query(self, entity: str, relation: str) -> str:
        """Returns e.g. "best friend of Nora"."""
        return f"{relation} of {entity}"

    def read_query(self, body: str) -> tuple[str, str]:
        """Returns entity and relation. Raises ToolError, which says what to write instead, for
        anything but one of each."""
        *relations, entity = self._parts(body)
        if not relations:
            raise ToolError(f'Write one relation and one name, e.g. "{self._sample}".')
        for relation in relations:
            if relation not in self.relations:
                raise ToolError(
                    f'There is no relation "{_shown(relation)}"; the relations are'
                    f" {', '.join(self.relations)}."
                )
        if entity not in self.entities:
            raise ToolError(
                f'There is no person "{_shown(entity)}". Write one relation and one name, e.g.'
                f' "{self._sample}".'
            )
        if len(relations) > 1:
            raise ToolError(
                f'One relation at a time: look up "{self.query(entity, relations[-1])}" first.'
            )
        return entity, relations[0]

    def fact(self, entity: str, relation: str, found: str) -> str:
        """Returns e.g. "The best friend of Nora is Ruben."."""
        return f"The {relation} of {entity} is {found}."

    def read_fact(self, text: str) -> str | None:
        """Returns the person that a search found, or None for another text."""
        found = _FACT.fullmatch(text.strip())
        return found[3] if found and found[3] in self.entities else None

    def thought(self, entity: str, relation: str, *, is_last: bool) -> str:
        """Returns e.g. "I need the best friend of Nora first.", "now" instead of "first" before the
        last search."""
        return f"I need the {relation} of {entity} {'now' if is_last else 'first'}."

    def vocabulary(self) -> tuple[str, ...]:
        """Returns nothing: the language is open."""
        return ()

    def _parts(self, text: str) -> list[str]:
        """Returns what stands between the "of"s, at least one part; known names and relations in
        their own spelling."""
        plain = _OPENING.sub("", " ".join(text.casefold().strip(_EDGES).split()))
        parts = [part.strip(_EDGES).removeprefix("the ").strip() for part in plain.split(" of ")]
        return [self._known.get(part, part) for part in parts]


def _shown(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


@cache
def wording(num_entities: int, num_relations: int, *, words: bool) -> Wording:
    """Returns how a world of this size speaks; English has len(NAMES) entities and len(RELATIONS)
    relations at most."""
    if words:
        return English(NAMES[:num_entities], RELATIONS[:num_relations])
    return Symbols(
        tuple(f"e{n}" for n in range(num_entities)), tuple(f"r{n}" for n in range(num_relations))
    )
