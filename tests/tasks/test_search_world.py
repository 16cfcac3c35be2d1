"""The search world: questions that their own facts answer, worlds that never meet, experts right
and wrong, plain English."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.error_codes import raises_code

from treegraft.core.errors import ToolError
from treegraft.core.types import StepContent, Task
from treegraft.settings.tasks import SearchWorldSettings, TasksSettings
from treegraft.tasks.build import build_tasks
from treegraft.tasks.search_words import NAMES, RELATIONS, English
from treegraft.tasks.search_world import SearchWorld, World


def make_source(
    seed: int = 0, num_train: int = 60, num_eval: int = 20, **options: object
) -> SearchWorld:
    world = SearchWorldSettings.model_validate(options)
    return SearchWorld(world, seed=seed, num_train=num_train, num_eval=num_eval)


def all_tasks(source: SearchWorld) -> list[Task]:
    return [*source.train_tasks(), *source.eval_tasks(), *source.warmup_tasks(30, 0)]


@given(st.integers(0, 2**32), st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True))
@settings(max_examples=15, deadline=None)
def test_the_expert_finds_the_reference_through_the_tool(seed: int, hops: list[int]) -> None:
    source = make_source(seed, 6, 6, hops=hops)
    (tool,) = source.tools()
    for task in [*source.train_tasks(), *source.eval_tasks()]:
        *searches, last = source.expert(task, 0)
        assert len(searches) == task.columns["hops"]
        for step in searches:
            assert asyncio.run(tool(step.calls[0].body, task)) == step.observations[0].text
        assert (last.answer,) == task.reference
        assert source.early_answer(task, searches) == last.answer


def test_a_question_reads_outermost_relation_first() -> None:
    source = make_source(hops=[2])
    task = source.train_tasks()[0]
    outer, of, inner, of_too, entity, mark = task.question.split()
    assert (of, of_too, mark) == ("of", "of", "?")
    world = World(task.columns["world"], 64, 8)
    assert world.look_up(world.look_up(entity, inner), outer) == task.reference[0]
    assert world.fact(entity, inner).split() == [
        inner,
        "of",
        entity,
        "is",
        world.look_up(entity, inner),
    ]


def test_worlds_of_different_purposes_are_different() -> None:
    source = make_source()
    train = {task.columns["world"] for task in source.train_tasks()}
    held_out = [task.columns["world"] for task in source.eval_tasks()]
    warmup = [
        task.columns["world"] for task in (*source.warmup_tasks(30, 0), *source.warmup_tasks(30, 1))
    ]
    assert len(train) == 1
    assert len({*train, *held_out, *warmup}) == 1 + 20 + 60


def test_lengths_have_equal_shares_and_questions_differ() -> None:
    tasks = make_source(num_train=90).train_tasks()
    assert Counter(task.category for task in tasks) == {"1 hop": 30, "2 hops": 30, "3 hops": 30}
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 90


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert all_tasks(make_source(7)) == all_tasks(make_source(7))
    assert not {task.columns["world"] for task in all_tasks(make_source(7))} & {
        task.columns["world"] for task in all_tasks(make_source(8))
    }


def test_a_small_world_repeats_questions() -> None:
    # 8 entities and 5 relations make at most 40 questions of one hop.
    source = make_source(num_train=60, hops=[1], num_entities=8, num_relations=5)
    assert len(source.train_tasks()) == 60
    assert len({task.question for task in source.train_tasks()}) <= 40


@pytest.mark.parametrize(
    "body", ["", "e9", "r2 e9", "e9 r2 r3", "e64 r2", "e9 r8", "paris capital", "e9\x00 r2"]
)
def test_what_the_tool_does_not_know_is_an_error_in_its_own_words(body: str) -> None:
    source = make_source()
    (tool,) = source.tools()
    with pytest.raises(ToolError) as caught:
        asyncio.run(tool(body, source.train_tasks()[0]))
    assert set(str(caught.value).split()) <= set(source.vocabulary())


def test_the_vocabulary_has_every_word() -> None:
    source = make_source()
    words = {word for task in all_tasks(source) for word in task.question.split()}
    for task in all_tasks(source):
        for step in source.expert(task, 0):
            texts = (
                [call.body for call in step.calls]
                + [seen.text for seen in step.observations]
                + [step.answer or ""]
            )
            words |= {word for text in texts for word in text.split()}
    assert words <= set(source.vocabulary())
    assert len(source.vocabulary()) == len(set(source.vocabulary())) == 64 + 8 + 4


def test_early_answers_are_the_last_entity_found() -> None:
    source = make_source(hops=[3])
    task = source.train_tasks()[0]
    steps = source.expert(task, 0)
    assert source.early_answer(task, []) is None
    assert [source.early_answer(task, steps[: n + 1]) for n in range(3)] == task.columns["path"][1:]


class EmptySource:
    def __init__(self, *, seed: int, num_train: int, num_eval: int) -> None:
        pass


def test_a_source_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "treegraft.core.import_paths.load_object",
        {"mine:Empty": EmptySource, "mine:World": _world}.get,
    )
    with raises_code("members-missing"):
        build_tasks(TasksSettings(kind="mine:Empty"), seed=0)
    with raises_code("own-code-call"):
        build_tasks(TasksSettings(kind="mine:Empty", options={"colour": 1}), seed=0)
    source = build_tasks(
        TasksSettings(kind="mine:World", num_eval=1, options={"hops": [4]}), seed=0
    )
    assert source.eval_tasks()[0].category == "4 hops"


def _world(*, seed: int, num_train: int, num_eval: int, hops: list[int]) -> SearchWorld:
    return make_source(seed, num_train, num_eval, hops=hops)


# --- an imperfect expert --------------------------------------------------------------------------


def searches_of(steps: tuple[StepContent, ...]) -> list[tuple[str, ...]]:
    """Returns (entity, relation) of each search of a symbolic trace."""
    return [tuple(step.calls[0].body.split()) for step in steps[:-1]]


def split_off_detours(
    done: list[tuple[str, ...]], way: list[tuple[str, ...]]
) -> Iterator[tuple[tuple[str, ...] | None, int]]:
    """Yields for each search of the way the useless one before it, or None, and its place; fails
    for another shape."""
    left = list(done)
    for place, right in enumerate(way):
        first = left.pop(0)
        if first == right:
            yield None, place
            continue
        assert left.pop(0) == right
        yield first, place
    assert not left


def within(count: int, num: int, share: float) -> bool:
    """Whether a count lies within four standard deviations of a binomial's mean."""
    return abs(count - num * share) <= 4 * math.sqrt(num * share * (1 - share))


def test_shares_of_detours_and_errors() -> None:
    perfect = make_source(hops=[1, 3, 5])
    source = make_source(hops=[1, 3, 5], detour_prob=0.4, error_prob=0.3)
    decisions: Counter[str] = Counter()
    answers: Counter[str] = Counter()
    for task in source.train_tasks()[:12]:
        way = searches_of(perfect.expert(task, 0))
        right = task.reference[0]
        for seed in range(120):
            steps = source.expert(task, seed)
            done = searches_of(steps)
            for detour, place in split_off_detours(done, way):
                kind = (
                    "none"
                    if detour is None
                    else "wrong relation"
                    if detour[0] == way[place][0]
                    else "elsewhere"
                )
                decisions[kind] += 1
                assert kind != "wrong relation" or detour[1] != way[place][1]  # type: ignore[index]
            seen = [step.observations[0].text.split()[-1] for step in steps[:-1]]
            met = {entity for entity, _ in done} | set(seen)
            answers[
                "right"
                if steps[-1].answer == right
                else "met"
                if steps[-1].answer in met
                else "any"
            ] += 1
    num = decisions.total()
    assert num == 120 * 4 * (1 + 3 + 5)
    assert within(decisions["none"], num, 0.6)
    assert within(decisions["wrong relation"], num, 0.2)
    assert within(decisions["elsewhere"], num, 0.2)
    assert within(answers["right"], 1440, 0.7)
    # Half of the wrong answers are any of 63 entities, and at most 15 of those were met: 5 on the
    # way, 10 on detours.
    assert 0.15 * 48 / 63 - 0.04 < answers["any"] / 1440 < 0.15 + 0.04


def test_only_training_questions_are_solved_with_faults() -> None:
    perfect = make_source()
    source = make_source(detour_prob=0.9, error_prob=1.0)
    for task in (*source.eval_tasks(), *source.warmup_tasks(20, 0)):
        assert source.expert(task, 1) == perfect.expert(task, 1)
    for task in source.train_tasks():
        assert source.expert(task, 1)[-1].answer not in {*task.reference, None}


def test_an_expert_of_short_questions_stops_too_early_at_longer_ones() -> None:
    perfect = make_source(hops=[1, 3])
    source = make_source(hops=[1, 3], expert_hops=1)
    short, long = source.train_tasks()[:2]
    assert source.expert(short, 0) == perfect.expert(short, 0)
    search, answer = source.expert(long, 0)
    assert search.calls == perfect.expert(long, 0)[0].calls
    assert answer.answer == search.observations[0].text.split()[-1] != long.reference[0]
    held_out = source.eval_tasks()[1]
    assert len(source.expert(held_out, 0)) == 4


# --- in words -------------------------------------------------------------------------------------


def to_words(text: str) -> str:
    """Returns the symbols of a text replaced by their English names."""
    named = re.sub(r"\be(\d+)\b", lambda found: NAMES[int(found[1])], text)
    return re.sub(r"\br(\d+)\b", lambda found: RELATIONS[int(found[1])], named)


def test_words_say_the_same_world() -> None:
    symbols = make_source(3, hops=[1, 3, 5])
    words = make_source(3, hops=[1, 3, 5], words=True)
    for plain, spoken in zip(all_tasks(symbols), all_tasks(words), strict=True):
        assert spoken.reference == tuple(map(to_words, plain.reference))
        assert spoken.columns["path"] == [to_words(entity) for entity in plain.columns["path"]]
        assert {k: spoken.columns[k] for k in ("world", "hops")} == {
            k: plain.columns[k] for k in ("world", "hops")
        }
        assert (spoken.id, spoken.category) == (plain.id, plain.category)
        parts = to_words(plain.question).removesuffix(" ?").split(" of ")
        assert spoken.question == "Who is the " + " of the ".join(parts[:-1]) + f" of {parts[-1]}?"


@given(
    st.sampled_from(NAMES),
    st.lists(st.sampled_from(RELATIONS), min_size=1, max_size=5),
    st.sampled_from([str.lower, str.upper, str.title, str]),
    st.sampled_from(["", " ", "\n", ' "', "\u201c"]),
    st.sampled_from(["", " ", "?", ".", ' ?" ', "\n"]),
)
def test_questions_and_queries_are_read_back(
    name: str, relations: list[str], case: type[str], before: str, after: str
) -> None:
    english = English(NAMES, RELATIONS)
    question = english.question(relations, name)
    assert english.read_question(question) == (relations, name)
    assert english.read_question(before + case(question).replace(" ", "  ") + after) == (
        relations,
        name,
    )
    query = english.query(name, relations[0])
    for said in (query, f"the {query}", f"Who is the {query}?", f"What is the {query}"):
        assert english.read_query(before + case(said).replace(" of ", "\n of  ") + after) == (
            name,
            relations[0],
        )
    assert english.read_fact(english.fact(name, relations[0], NAMES[7])) == NAMES[7]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("", ["Write one relation and one name", '"teacher of Mira"']),
        ("Mira", ["Write one relation and one name"]),
        ("teacher Mira", ["Write one relation and one name"]),
        ("uncle of Mira", ['no relation "uncle"', "teacher, neighbour, best friend"]),
        ("teacher of Zaphod", ['no person "zaphod"', '"teacher of Mira"']),
        ("teacher of Wanda", ['no person "wanda"']),  # a name, but the 96th in a world of 64
        ("tutor of Mira", ['no relation "tutor"']),
        ("teacher of the neighbour of Mira", ["One relation at a time", '"neighbour of Mira"']),
        ("the " + "x" * 500 + " of Mira", ['no relation "' + "x" * 40 + '..."']),
    ],
)
def test_what_the_tool_does_not_know_it_explains(body: str, parts: list[str]) -> None:
    source = make_source(words=True)
    (tool,) = source.tools()
    assert '"teacher of Mira"' in tool.description
    with pytest.raises(ToolError) as caught:
        asyncio.run(tool(body, source.train_tasks()[0]))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(("name", "num"), [("num_entities", 97), ("num_relations", 17)])
def test_worlds_with_more_things_than_words_are_refused(name: str, num: int) -> None:
    make_source(words=True, **{name: num - 1})
    make_source(words=False, **{name: num})
    with raises_code("words-too-few"):
        make_source(words=True, **{name: num})


@pytest.mark.parametrize(
    "question",
    ["What is 2 + 3?", "Who is Mira?", "Who is the uncle of Mira?", "r5 of r2 of e9 ?", ""],
)
def test_questions_of_others_are_refused_with_an_example(question: str) -> None:
    with raises_code("foreign-question", match="Who is the neighbour of the teacher of Mira"):
        make_source(words=True).expert(Task(id="x", question=question, reference=()), 0)
