"""The search world: questions that their own facts answer, worlds that never meet, an expert that is right."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treegraft.config import SearchWorldSettings, TasksSettings
from treegraft.errors import SettingError, ToolError
from treegraft.tasks.build import build_tasks
from treegraft.tasks.search_world import SearchWorld, World
from treegraft.types import Task


def make_source(seed: int = 0, num_train: int = 60, num_eval: int = 20, **options: object) -> SearchWorld:
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
    assert world.fact(entity, inner).split() == [inner, "of", entity, "is", world.look_up(entity, inner)]


def test_paths_have_different_entities_and_relations() -> None:
    for task in all_tasks(make_source(hops=[5])):
        path = task.columns["path"]
        assert len(set(path)) == len(path) == 6
        relations = [word for word in task.question.split() if word.startswith("r")]
        assert len(set(relations)) == 5


def test_worlds_of_different_purposes_are_different() -> None:
    source = make_source()
    train = {task.columns["world"] for task in source.train_tasks()}
    held_out = [task.columns["world"] for task in source.eval_tasks()]
    warmup = [task.columns["world"] for task in (*source.warmup_tasks(30, 0), *source.warmup_tasks(30, 1))]
    assert len(train) == 1
    assert len({*train, *held_out, *warmup}) == 1 + 20 + 60


def test_lengths_have_equal_shares_and_questions_differ() -> None:
    tasks = make_source(num_train=90).train_tasks()
    assert Counter(task.category for task in tasks) == {"1 hop": 30, "2 hops": 30, "3 hops": 30}
    assert len({task.question for task in tasks}) == len({task.id for task in tasks}) == 90
    assert {task.columns["hops"] for task in make_source().warmup_tasks(6, 0, hops=[4])} == {4}


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others() -> None:
    assert all_tasks(make_source(7)) == all_tasks(make_source(7))
    assert not {task.columns["world"] for task in all_tasks(make_source(7))} & {
        task.columns["world"] for task in all_tasks(make_source(8))
    }


def test_a_fact_is_a_keyed_hash() -> None:
    # Written out, because recorded runs stay readable only as long as a world's number keeps its facts.
    digest = hashlib.blake2b(b"str:fact\x1fint:4\x1fstr:e9\x1fstr:r2", digest_size=8).digest()
    assert World(4, 64, 8).fact("e9", "r2") == f"r2 of e9 is e{int.from_bytes(digest, 'big') % 64}"


def test_a_small_world_repeats_questions_and_says_so() -> None:
    # 8 entities and 5 relations make at most 40 questions of one hop.
    source = make_source(num_train=60, hops=[1], num_entities=8, num_relations=5)
    assert len(source.train_tasks()) == 60
    (sentence,) = source.report()
    assert "60 training questions" in sentence
    assert make_source().report() == ()


@pytest.mark.parametrize("body", ["", "e9", "r2 e9", "e9 r2 r3", "e64 r2", "e9 r8", "paris capital", "e9\x00 r2"])
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
            texts = [call.body for call in step.calls] + [seen.text for seen in step.observations] + [step.answer or ""]
            words |= {word for text in texts for word in text.split()}
    assert words <= set(source.vocabulary())
    assert len(source.vocabulary()) == len(set(source.vocabulary())) == 64 + 8 + 4


def test_early_answers_are_the_last_entity_found() -> None:
    source = make_source(hops=[3])
    task = source.train_tasks()[0]
    steps = source.expert(task, 0)
    assert source.early_answer(task, []) is None
    assert [source.early_answer(task, steps[: n + 1]) for n in range(3)] == task.columns["path"][1:]


@pytest.mark.parametrize("hops", [[], [0], [1, 6]])
def test_lengths_out_of_range_are_refused(hops: list[int]) -> None:
    with pytest.raises(SettingError, match=r"search_world\.hops"):
        make_source(hops=hops)


def test_sources_by_name() -> None:
    source = build_tasks(TasksSettings(num_train=3, num_eval=2), seed=0)
    assert isinstance(source, SearchWorld)
    assert len(source.train_tasks()) == 3
    with pytest.raises(SettingError, match="Did you mean 'search_world'"):
        build_tasks(TasksSettings(kind="serch_world"), seed=0)


class EmptySource:
    def __init__(self, *, seed: int, num_train: int, num_eval: int) -> None:
        pass


def test_a_source_by_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegraft.tasks.build.load_object", {"mine:Empty": EmptySource, "mine:World": _world}.get)
    with pytest.raises(SettingError, match="without train_tasks"):
        build_tasks(TasksSettings(kind="mine:Empty"), seed=0)
    with pytest.raises(SettingError, match="colour"):
        build_tasks(TasksSettings(kind="mine:Empty", options={"colour": 1}), seed=0)
    source = build_tasks(TasksSettings(kind="mine:World", num_eval=1, options={"hops": [4]}), seed=0)
    assert source.eval_tasks()[0].category == "4 hops"


def _world(*, seed: int, num_train: int, num_eval: int, hops: list[int]) -> SearchWorld:
    return make_source(seed, num_train, num_eval, hops=hops)
