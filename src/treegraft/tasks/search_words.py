"""The wording of a search world: symbols for a word-level tokenizer, or plain English for models
that know language.

                symbols                 English
    question    r5 of r2 of e9 ?        Who is the cousin of the best friend of Nora?
    query       e9 r2                   best friend of Nora
    fact        r2 of e9 is e41         The best friend of Nora is Ruben.
    thought     (none), need r2 of e9   I need the best friend of Nora first.
    error       unknown                 There is no relation "uncle"; the relations are teacher, ...

A wording only names things; the facts of a world are the same in both. Relations go in the order in
which they are looked up.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from treegraft.core.errors import ToolError

UNKNOWN: Final = "unknown"
"""The whole text of an error in symbols: a word-level tokenizer knows no other words."""

_NAMES: Final = """
Mira Tomas Ines Ruben Clara Oscar Nora Felix Lena Hugo Emma Simon Julia Victor Alice Martin
Sara Daniel Eva Leo Anna Peter Laura Adam Rosa Paul Maria Jonas Helen David Sofia Lucas
Iris Walter Olga Marco Linda Henry Diana Robert Carmen Philip Amelia George Ruth Edward Vera Thomas
Elena Arthur Marta Louis Judith Samuel Bella Patrick Greta Oliver Nadia Albert Stella Frank Ivan
Yara Abel Agnes Basil Bruno Cyrus Della Dora Edith Elias Ezra Flora Gavin Gloria Harold Hilda Ida
Jasper Joan Karl Klara Lydia Magnus Mabel Milo Nina Otto Pablo Rita Ronan Silas Thea Wanda
"""
NAMES: Final = tuple(_NAMES.split())
"""Entities in English: one word each, no two alike, none a number or an article."""

RELATIONS: Final = (
    "teacher",
    "neighbour",
    "best friend",
    "boss",
    "doctor",
    "cousin",
    "coach",
    "partner",
    "tutor",
    "lawyer",
    "dentist",
    "landlord",
    "mentor",
    "rival",
    "roommate",
    "driver",
)
"""Relations in English. Any person can be any other's, so that a random fact is no odd one."""

_EDGES: Final = " \t\n\"'\u2018\u2019\u201c\u201d.,;:!?"
_OPENING: Final = re.compile(r"^(?:who|what)(?: is|['\u2019]s) ")
_FACT: Final = re.compile(r"The (.+) of (.+) is (.+)\.")


@dataclass(frozen=True)
class Symbols:
    """Symbols(("e0", "e1", ...), ("r0", "r1", ...)): one token a word, and not one word more than
    needed."""

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    description: str = 'Looks up one fact. Write an entity and a relation, e.g. "e9 r2".'
    """The search tool's part of the system prompt."""
    example: str = "r5 of r2 of e9 ?"
    """A question of two hops, for error texts."""
    last_thought: str = ""
    """The expert's thought before the answer."""

    def question(self, relations: Sequence[str], entity: str) -> str:
        """Returns the outermost relation first, e.g. "r5 of r2 of e9 ?"."""
        return " of ".join([*reversed(relations), entity]) + " ?"

    def read_question(self, text: str) -> tuple[list[str], str] | None:
        """Returns relations and entity, or None for a text that is no question about this world."""
        return _question_of(text.strip().removesuffix("?").strip().split(" of "), self)

    def query(self, entity: str, relation: str) -> str:
        """Returns the text of a search, e.g. "e9 r2"."""
        return f"{entity} {relation}"

    def read_query(self, body: str) -> tuple[str, str]:
        """Returns entity and relation. Raises ToolError for anything but one of each, in this
        order."""
        words = body.split()
        if len(words) != 2 or words[0] not in self.entities or words[1] not in self.relations:
            raise ToolError(UNKNOWN, code="query-unknown")
        return words[0], words[1]

    def fact(self, entity: str, relation: str, found: str) -> str:
        """Returns the result of a search, e.g. "r2 of e9 is e41"."""
        return f"{relation} of {entity} is {found}"

    def read_fact(self, text: str) -> str | None:
        """Returns the entity that a search found, or None for another text."""
        words = text.split()
        return words[4] if len(words) == 5 and words[3] == "is" else None

    def thought(self, entity: str, relation: str, *, is_last: bool) -> str:
        """Returns a thought such as "need r2 of e9"; empty if the expert writes no thoughts."""
        return f"need {relation} of {entity}" if self.last_thought else ""

    def vocabulary(self) -> tuple[str, ...]:
        """Returns every word of questions, results, errors and answers."""
        thoughts = ("need", self.last_thought) if self.last_thought else ()
        return (*self.relations, *self.entities, "of", "?", "is", UNKNOWN, *thoughts)


@dataclass(frozen=True)
class English:
    """English(("Mira", "Tomas", ...), ("teacher", "neighbour", ...)): persons and their relations.

    Reading ignores case, spaces, line breaks, articles, quotes, punctuation at the ends and an
    opening "Who is", which language models vary.
    """

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    last_thought: str = "That answers the question."
    """The expert's thought before the answer; it says nothing that an early answer would not
    say."""
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
        parts = [*(f"the {relation}" for relation in reversed(relations)), entity]
        return f"Who is {' of '.join(parts)}?"

    def read_question(self, text: str) -> tuple[list[str], str] | None:
        """Returns relations and entity, or None for a text that is no question about this world."""
        return _question_of(self._parts(text), self)

    def query(self, entity: str, relation: str) -> str:
        """Returns the text of a search, e.g. "best friend of Nora"."""
        return f"{relation} of {entity}"

    def read_query(self, body: str) -> tuple[str, str]:
        """Returns entity and relation. Raises ToolError, whose text tells the agent how to ask, for
        anything but one of each."""
        *relations, entity = self._parts(body)
        if not relations:
            raise ToolError(
                f'Write one relation and one name, e.g. "{self._sample}".', code="query-invalid"
            )
        for relation in relations:
            if relation not in self.relations:
                raise ToolError(
                    f'There is no relation "{_shown(relation)}"; the relations are'
                    f" {', '.join(self.relations)}.",
                    code="relation-unknown",
                )
        if entity not in self.entities:
            raise ToolError(
                f'There is no person "{_shown(entity)}". Write one relation and one name, e.g.'
                f' "{self._sample}".',
                code="entity-unknown",
            )
        if len(relations) > 1:
            # The innermost relation, whose entity is known already.
            raise ToolError(
                f'One relation at a time: look up "{self.query(entity, relations[-1])}" first.',
                code="one-relation",
            )
        return entity, relations[0]

    def fact(self, entity: str, relation: str, found: str) -> str:
        """Returns the result of a search, e.g. "The best friend of Nora is Ruben."."""
        return f"The {relation} of {entity} is {found}."

    def read_fact(self, text: str) -> str | None:
        """Returns the person that a search found, or None for another text."""
        found = _FACT.fullmatch(text.strip())
        return found[3] if found and found[3] in self.entities else None

    def thought(self, entity: str, relation: str, *, is_last: bool) -> str:
        """Returns the expert's thought before a search, e.g. "I need the best friend of Nora
        first.", with "now" instead of "first" before the last search."""
        return f"I need the {relation} of {entity} {'now' if is_last else 'first'}."

    def vocabulary(self) -> tuple[str, ...]:
        """Returns nothing: the language is open."""
        return ()

    def _parts(self, text: str) -> list[str]:
        """Returns the parts between the "of"s, at least one; known names and relations in their
        own spelling."""
        plain = _OPENING.sub("", " ".join(text.casefold().strip(_EDGES).split()))
        parts = [part.strip(_EDGES).removeprefix("the ").strip() for part in plain.split(" of ")]
        return [self._known.get(part, part) for part in parts]


Wording = Symbols | English


def _question_of(parts: Sequence[str], wording: Wording) -> tuple[list[str], str] | None:
    # The last part is the innermost: "r5 of r2 of e9".
    *relations, entity = parts
    is_known = entity in wording.entities and set(relations) <= set(wording.relations)
    # In the order of looking up; the text has the outermost first.
    return (relations[::-1], entity) if relations and is_known else None


def _shown(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}..."


# Every call of the tool asks for it, and English builds a table of its words.
@cache
def wording(num_entities: int, num_relations: int, words: bool, thinks: bool = False) -> Wording:
    """Returns the wording of a world of this size, where symbols may have thoughts; English has
    len(NAMES) entities and len(RELATIONS) relations at most."""
    if words:
        return English(NAMES[:num_entities], RELATIONS[:num_relations])
    entities = tuple(f"e{n}" for n in range(num_entities))
    relations = tuple(f"r{n}" for n in range(num_relations))
    return Symbols(entities, relations, last_thought="done" if thinks else "")
