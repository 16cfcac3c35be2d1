"""A seeded world of entities and relations, and questions that take one search per hop.

    question   r5 of r2 of e9 ?
    search     e9 r2        ->  r2 of e9 is e41
    search     e41 r5       ->  r5 of e41 is e7
    answer     e7

A fact is a keyed hash of (world, entity, relation), so a world is one number and needs no table. The training questions
share one world; every held-out and every warm-up question has a world of its own, so nothing can be learned by heart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from treegraft.config import SearchWorldSettings
from treegraft.errors import SettingError, ToolError
from treegraft.interfaces import Capability, Tool
from treegraft.tasks.keyed import keyed_choice, keyed_int
from treegraft.types import Observation, StepContent, Task, ToolCall

MAX_HOPS = 5
UNKNOWN = "unknown"
"""The whole text of an error: a word-level tokenizer knows no other words."""

_LANES: Final = ("train", "eval", "warmup")
"""A world's number modulo 4 is its lane, so worlds of different purposes are never the same."""
_MAX_DRAWS = 10_000
_MAX_REPEATS = 100


@dataclass(frozen=True, slots=True)
class World:
    """World(seed=20, num_entities=64, num_relations=8)"""

    seed: int
    num_entities: int
    num_relations: int

    def look_up(self, entity: str, relation: str) -> str:
        """Returns the entity that the relation leads to."""
        return f"e{keyed_int('fact', self.seed, entity, relation) % self.num_entities}"

    def fact(self, entity: str, relation: str) -> str:
        """Returns the fact as the search tool writes it."""
        return f"{relation} of {entity} is {self.look_up(entity, relation)}"

    @property
    def entities(self) -> tuple[str, ...]:
        """Every entity's word."""
        return tuple(f"e{number}" for number in range(self.num_entities))

    @property
    def relations(self) -> tuple[str, ...]:
        """Every relation's word."""
        return tuple(f"r{number}" for number in range(self.num_relations))


class WorldSearch:
    """The tool of the world: one fact per call."""

    name = "search"
    description = 'Looks up one fact. Write an entity and a relation, e.g. "e9 r2".'
    capability = Capability.STATELESS
    cacheable = False  # the same words mean different facts in different worlds, and hashing is cheaper than a cache

    def __init__(self, settings: SearchWorldSettings, default_world: int) -> None:
        self._settings = settings
        self._default_world = default_world

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the fact in the task's world, for a task of another source in the training world.

        Raises:
            ToolError: the body is not one known entity and one known relation, in this order.
        """
        seed = task.columns.get("world", self._default_world)
        world = World(seed, self._settings.num_entities, self._settings.num_relations)
        words = body.split()
        if len(words) != 2 or words[0] not in world.entities or words[1] not in world.relations:
            raise ToolError(UNKNOWN)
        return world.fact(*words)

    async def close(self) -> None:
        """Nothing to close."""


class SearchWorld:
    """Questions of one to five hops, in equal shares by length."""

    def __init__(self, settings: SearchWorldSettings, *, seed: int, num_train: int, num_eval: int) -> None:
        """Raises SettingError for lengths outside 1..5 or that the world has too few relations for."""
        if not settings.hops or not all(1 <= hops <= MAX_HOPS for hops in settings.hops):
            raise SettingError(
                f"tasks.search_world.hops is {settings.hops}; expected one or more question lengths, each 1..{MAX_HOPS}"
            )
        self._settings = settings
        self._seed = seed
        self._num_train = num_train
        self._num_eval = num_eval
        self._train_world = self._world(0, "train")

    def train_tasks(self) -> Sequence[Task]:
        """Returns the training questions, all in one world."""
        return self._train

    def eval_tasks(self) -> Sequence[Task]:
        """Returns the held-out questions, each in a world of its own."""
        return self._eval

    def tools(self) -> Sequence[Tool]:
        """Returns the search over the world's facts."""
        return (WorldSearch(self._settings, self._train_world.seed),)

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...]:
        """Returns one search per hop and the answer; there is one way to do it, whatever the seed.

        Raises:
            SettingError: the task is not a question of a search world.
        """
        relations, entity, world = self._read(task)
        steps: list[StepContent] = []
        for relation in relations:
            call = ToolCall("search", f"{entity} {relation}")
            steps.append(StepContent(calls=(call,), observations=(Observation(text=world.fact(entity, relation)),)))
            entity = world.look_up(entity, relation)
        return (*steps, StepContent(answer=entity))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns the last entity that a search found; None before the first."""
        for step in reversed(steps):
            for observation in reversed(step.observations):
                words = observation.text.split()
                if not observation.is_error and len(words) == 5 and words[3] == "is":
                    return words[4]
        return None

    def warmup_tasks(self, num: int, seed: int, hops: Sequence[int] | None = None) -> Sequence[Task]:
        """Returns questions that each have a world of their own, none of them a training or held-out world.

        Args:
            hops: lengths in equal shares; None takes those of the settings.
        """
        lengths = tuple(hops or self._settings.hops)
        return tuple(
            self._task("warmup", number, self._world(seed, "warmup", number), lengths[number % len(lengths)], set())
            for number in range(num)
        )

    def vocabulary(self) -> Sequence[str]:
        """Returns every word of questions, results, errors and answers."""
        return (*self._train_world.relations, *self._train_world.entities, "of", "?", "is", UNKNOWN)

    def report(self) -> Sequence[str]:
        """Returns a sentence where the training world has too few different questions."""
        num_repeats = len(self._train) - len({task.question for task in self._train})
        if not num_repeats:
            return ()
        return (
            f"search_world: {num_repeats} of {len(self._train)} training questions occur more than once; a world of "
            f"{self._settings.num_entities} entities and {self._settings.num_relations} relations has no more",
        )

    @cached_property
    def _train(self) -> tuple[Task, ...]:
        seen: set[str] = set()
        hops = self._settings.hops
        return tuple(
            self._task("train", number, self._train_world, hops[number % len(hops)], seen) for number in range(self._num_train)
        )

    @cached_property
    def _eval(self) -> tuple[Task, ...]:
        hops = self._settings.hops
        return tuple(
            self._task("eval", number, self._world(0, "eval", number), hops[number % len(hops)], set())
            for number in range(self._num_eval)
        )

    def _world(self, seed: int, purpose: str, number: int = 0) -> World:
        # Under 2^53, so that the number survives any JSON reader.
        high = keyed_int("world", self._seed, seed, purpose, number) >> 14
        lane = _LANES.index(purpose)
        return World(high * 4 + lane, self._settings.num_entities, self._settings.num_relations)

    def _task(self, purpose: str, number: int, world: World, hops: int, seen: set[str]) -> Task:
        """Returns a question with distinct entities on its way, and not one of `seen` while there are others."""
        for draw in range(_MAX_DRAWS):
            key = ("question", world.seed, purpose, number, draw)
            path, relations = _draw_path(world, hops, key)
            question = " of ".join([*reversed(relations), path[0]]) + " ?"
            if len(set(path)) == len(path) and (question not in seen or draw >= _MAX_REPEATS):
                seen.add(question)
                return Task(
                    id=f"search_world/{purpose}/{number}",
                    question=question,
                    reference=(path[-1],),
                    category="1 hop" if hops == 1 else f"{hops} hops",
                    columns={"world": world.seed, "hops": hops, "path": list(path)},
                )
        raise SettingError(
            f"tasks.search_world: no question of {hops} hops with different entities found in a world of "
            f"{world.num_entities} entities; raise tasks.search_world.num_entities"
        )

    def _read(self, task: Task) -> tuple[list[str], str, World]:
        *relations, entity = task.question.removesuffix("?").strip().split(" of ")
        seed = task.columns.get("world", self._train_world.seed)
        world = World(seed, self._settings.num_entities, self._settings.num_relations)
        if not relations or entity not in world.entities or not set(relations) <= set(world.relations):
            raise SettingError(f"task '{task.id}': '{task.question:.80}' is not a question such as 'r5 of r2 of e9 ?'")
        return relations[::-1], entity, world


def _draw_path(world: World, hops: int, key: tuple[int | str, ...]) -> tuple[list[str], list[str]]:
    """Returns the entities (hops + 1) and the relations (hops, all different) of a way through the world."""
    left = list(world.relations)
    path = [keyed_choice(world.entities, *key, "start")]
    relations: list[str] = []
    for hop in range(hops):
        relations.append(left.pop(keyed_int(*key, hop) % len(left)))
        path.append(world.look_up(path[-1], relations[-1]))
    return path, relations
