"""A seeded world of entities and relations, and questions that take one search per hop.

    question   r5 of r2 of e9 ?
    search     e9 r2        ->  r2 of e9 is e41
    search     e41 r5       ->  r5 of e41 is e7
    answer     e7

A fact is a keyed hash of (world, entity, relation), so a world is one number and needs no table.
The training questions share one world; every held-out and every warm-up question has a world of its
own, so nothing can be learned by heart.

With words = true the very same world is worded in English (`treegraft.tasks.search_words`), and its
expert has thoughts unless thoughts = false. With detour_prob and error_prob the expert is imperfect
in the training questions (`SearchWorld.expert`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Capability, Tool
from treegraft.core.keyed import keyed_choice, keyed_int, keyed_unit
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.open import OpenTasks
from treegraft.tasks.search_words import NAMES, RELATIONS, Wording, wording

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
    words: bool = False
    """Whether it is worded in English; the facts are the same."""
    thinks: bool = False
    """Whether symbols have thoughts."""

    @property
    def wording(self) -> Wording:
        """Its words, and how they make up questions and facts."""
        return wording(self.num_entities, self.num_relations, self.words, self.thinks)

    def look_up(self, entity: str, relation: str) -> str:
        """Returns the entity that the relation leads to. Raises ValueError for one that the world
        does not have."""
        # By place and not by word, so that both wordings have the same facts.
        key = (f"e{self.entities.index(entity)}", f"r{self.relations.index(relation)}")
        return self.entities[keyed_int("fact", self.seed, *key) % self.num_entities]

    def fact(self, entity: str, relation: str) -> str:
        """Returns the fact as the search tool writes it."""
        return self.wording.fact(entity, relation, self.look_up(entity, relation))

    @property
    def entities(self) -> tuple[str, ...]:
        """Every entity's word."""
        return self.wording.entities

    @property
    def relations(self) -> tuple[str, ...]:
        """Every relation's word."""
        return self.wording.relations


class WorldSearch:
    """The tool of the world: one fact per call."""

    name = "search"
    capability = Capability.STATELESS
    # The same words mean different facts in different worlds, and hashing is cheaper than a cache.
    cacheable = False

    def __init__(self, settings: SearchWorldSettings, default_world: int) -> None:
        self._settings = settings
        self._default_world = default_world
        self.description = _world(settings, default_world).wording.description

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the fact in the task's world, for a task of another source in the training world.

        Raises:
            ToolError: the body is not one known entity and one known relation.
        """
        world = _world(self._settings, task.columns.get("world", self._default_world))
        return world.fact(*world.wording.read_query(body))

    async def close(self) -> None:
        """Nothing to close."""


class SearchWorld(OpenTasks):
    """Questions of one to five hops, in equal shares by length."""

    def __init__(
        self, settings: SearchWorldSettings, *, seed: int, num_train: int, num_eval: int
    ) -> None:
        """Raises SettingError for more entities or relations than English has words."""
        # Only English runs out of words; symbols are numbered.
        for name, words in (("num_entities", NAMES), ("num_relations", RELATIONS)):
            if settings.words and getattr(settings, name) > len(words):
                raise SettingError(
                    f"tasks.search_world.{name} is {getattr(settings, name)}; expected at most"
                    f" {len(words)} with tasks.search_world.words = true, which has no more English"
                    " words. Lower it, or set words = false",
                    code="words-too-few",
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
        """Returns one search per hop and the answer: the one way to do it, unless the settings make
        the expert imperfect.

        Then the trace is a function of (task, seed), and with p = detour_prob and q = error_prob,
        drawn independently:

        * before each right search comes a useless one with probability p: with p/2 another entity
          and any relation, with p/2 the right entity and another relation, which the right search
          then corrects. So h hops take h (1 + p) calls on average, 2 h at most;
        * the answer is wrong with probability q: with q/2 an entity met on the way (asked about or
          found), with q/2 any, in both cases not the right one, else evenly spread.

        Of a question with more than expert_hops hops it answers what so many searches found. Only
        training questions are solved with faults.

        Raises:
            SettingError: the task is not a question of a search world.
        """
        # Tasks of other sources, such as a file of questions, have no world of their own.
        world = _world(self._settings, task.columns.get("world", self._train_world.seed))
        found = world.wording.read_question(task.question)
        if found is None:
            raise SettingError(
                f"task '{task.id}': '{task.question:.80}' is not a question of this search world,"
                f" such as '{world.wording.example}'; name the source that made it, or leave it"
                " out",
                code="foreign-question",
            )
        relations, entity = found
        # Only training questions, which a buffer is made of, are solved with faults: the warm-up
        # still teaches the skill, and held-out questions still measure it against faultless traces.
        is_fallible = world.seed % 4 == _LANES.index("train")
        thinks = self._settings.thoughts
        steps: list[StepContent] = []
        met = [entity]
        if is_fallible:
            relations = relations[: self._settings.expert_hops]
        for hop, relation in enumerate(relations):
            key = ("expert", world.seed, task.id, seed, hop)
            searches = [(entity, relation)]
            if is_fallible and keyed_unit(*key, "detour") < self._settings.detour_prob:
                searches.insert(0, _useless_search(world, entity, relation, key))
            for search in searches:
                is_last = hop == len(relations) - 1
                steps.append(
                    StepContent(
                        thought=world.wording.thought(*search, is_last=is_last) if thinks else "",
                        calls=(ToolCall("search", world.wording.query(*search)),),
                        observations=(Observation(text=world.fact(*search)),),
                    )
                )
                met += [search[0], world.look_up(*search)]
            # A detour leads nowhere: the right search went on from the same entity.
            entity = world.look_up(entity, relation)
        key = ("expert", world.seed, task.id, seed, len(relations))
        if is_fallible and keyed_unit(*key, "error") < self._settings.error_prob:
            entity = _wrong_answer(world, met, entity, key)
        last_thought = world.wording.last_thought if thinks else ""
        return (*steps, StepContent(thought=last_thought, answer=entity))

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns the last entity that a search found; None before the first."""
        for step in reversed(steps):
            for observation in reversed(step.observations):
                found = self._train_world.wording.read_fact(observation.text)
                if found is not None and not observation.is_error:
                    return found
        return None

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns questions that each have a world of their own, none of them a training or
        held-out world."""
        return self._tasks("warmup", num, lambda n: self._world(seed, "warmup", n))

    def vocabulary(self) -> Sequence[str]:
        """Returns every word of questions, results, errors and answers; none where they are
        English."""
        return self._train_world.wording.vocabulary()

    @cached_property
    def _train(self) -> tuple[Task, ...]:
        return self._tasks("train", self._num_train, lambda _: self._train_world)

    @cached_property
    def _eval(self) -> tuple[Task, ...]:
        return self._tasks("eval", self._num_eval, lambda n: self._world(0, "eval", n))

    def _tasks(self, purpose: str, num: int, world_of: Callable[[int], World]) -> tuple[Task, ...]:
        lengths = self._settings.hops
        seen: set[tuple[int, str]] = set()
        tasks: list[Task] = []
        for number in range(num):
            hops = lengths[number % len(lengths)]
            tasks.append(self._task(purpose, number, world_of(number), hops, seen))
        return tuple(tasks)

    def _world(self, seed: int, purpose: str, number: int = 0) -> World:
        # Under 2^53, so that the number survives any JSON reader.
        high = keyed_int("world", self._seed, seed, purpose, number) >> 14
        lane = _LANES.index(purpose)
        return _world(self._settings, high * 4 + lane)

    def _task(
        self, purpose: str, number: int, world: World, hops: int, seen: set[tuple[int, str]]
    ) -> Task:
        """Returns a question with distinct entities on its way, and not one of `seen` (world and
        question) while there are others."""
        for draw in range(_MAX_DRAWS):
            key = ("question", world.seed, purpose, number, draw)
            # All relations of a question differ, so that each of them is looked up once.
            left = list(world.relations)
            relations: list[str] = []
            path = [keyed_choice(world.entities, *key, "start")]
            for hop in range(hops):
                relations.append(left.pop(keyed_int(*key, hop) % len(left)))
                path.append(world.look_up(path[-1], relations[-1]))
            question = world.wording.question(relations, path[0])
            is_new = (world.seed, question) not in seen
            # A small world runs out of questions; rather than fail, some then occur twice.
            if len(set(path)) == len(path) and (is_new or draw >= _MAX_REPEATS):
                seen.add((world.seed, question))
                return Task(
                    id=f"search_world/{purpose}/{number}",
                    question=question,
                    reference=(path[-1],),
                    category="1 hop" if hops == 1 else f"{hops} hops",
                    columns={"world": world.seed, "hops": hops, "path": list(path)},
                )
        raise SettingError(
            f"tasks.search_world: no question of {hops} hops with different entities found in a"
            f" world of {world.num_entities} entities; raise tasks.search_world.num_entities",
            code="world-too-small",
        )


def _world(settings: SearchWorldSettings, seed: int) -> World:
    own = (settings.num_entities, settings.num_relations, settings.words, settings.bare_thoughts)
    return World(seed, *own)


def _useless_search(
    world: World, entity: str, relation: str, key: tuple[int | str, ...]
) -> tuple[str, str]:
    """Returns another entity and any relation, or as often the right entity and another
    relation."""
    if keyed_unit(*key, "kind") < 0.5:
        others = _without(entity, world.entities)
        return keyed_choice(others, *key, "entity"), keyed_choice(world.relations, *key, "relation")
    return entity, keyed_choice(_without(relation, world.relations), *key, "relation")


def _without(one: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word != one]


def _wrong_answer(world: World, met: Sequence[str], right: str, key: tuple[int | str, ...]) -> str:
    """Returns an entity that was met, or as often any; never the right one."""
    is_met = keyed_unit(*key, "kind") < 0.5
    # Of entities met, each once: one asked about twice is not more likely.
    others = _without(right, dict.fromkeys(met) if is_met else world.entities)
    return keyed_choice(others, *key, "entity")
