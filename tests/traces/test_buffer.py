"""The Step-Trace Buffer: what goes in comes out, after whatever happened in between."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.error_codes import raises_code
from tests.support.examples import at_most
from tests.support.killed_adds import CHUNK, endless

from treegraft.core.types import Observation, StepContent, Task, ToolCall, Trace
from treegraft.settings.explore import BufferSettings
from treegraft.traces import buffer as buffer_module
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.retrieve import BufferRetriever
from treegraft.traces.store import TraceFile

CONTENT = StepContent(
    thought="two hops left",
    calls=(ToolCall("search", "e9 r2"), ToolCall("python", 'print("\\n")')),
    observations=(
        Observation(text="r2 of e9 is e41"),
        Observation(text="E", is_error=True, is_truncated=True),
    ),
)


def trace(number: int = 0, **changes: object) -> Trace:
    """Returns step 1 of a trajectory of its own; its key shares no word with that of another
    number."""
    fields = {
        "key": f"question {number} ?\nword{number}",
        "value": f"value {number}",
        "reward": 1.0,
        "source": "expert",
        "task_id": f"task {number}",
        "position": 1,
        "terminal": False,
        "trajectory": f"t{number}",
    }
    return Trace(**{**fields, **changes})


def opened(path: Path) -> TraceBuffer:
    return TraceBuffer(path, "hashing")


class Planted:
    """An encoder whose vectors the test wrote down."""

    name = "planted"

    def __init__(self, vectors: dict[str, Sequence[float]]) -> None:
        self.vectors = vectors
        self.dim = 4

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        return np.array([self.vectors.get(text, (0, 0, 0, 1)) for text in texts], np.float32)


# ---------------------------------------------------------------------- in and out


def test_traces_come_back_as_they_went_in(tmp_path: Path) -> None:
    traces = [
        trace(0, value=CONTENT, reward=-1.0, policy_version=7),
        trace(1, value=StepContent(thought="so", answer="e7"), terminal=True),
        trace(
            2,
            key='line\n"quotes" \\ \t ünïcode 日本 \ud800 \x00',
            value="tab\tand \udfff lone surrogate",
        ),
    ]
    with opened(tmp_path / "b") as buffer:
        assert buffer.add(traces) == 3
        assert list(buffer) == traces
    with opened(tmp_path / "b") as buffer:
        assert list(buffer) == traces and len(buffer) == 3
        assert [
            found[0][0] for found in buffer.search([one.key for one in traces], allow_terminal=True)
        ] == traces


def test_equal_content_is_stored_once(tmp_path: Path) -> None:
    with opened(tmp_path / "b") as buffer:
        assert buffer.add([trace(0), trace(1), trace(0)]) == 2
        assert buffer.add([trace(1, reward=0.5, trajectory="another"), trace(2)]) == 1
        assert len(buffer) == 3
        # Another agent's or another task's is another trace.
        assert buffer.add([trace(0, source="other"), trace(0, task_id="other")]) == 2


# ---------------------------------------------------------------------- search


def planted(tmp_path: Path) -> TraceBuffer:
    """Cosines of the query "q" on paper: a 1, b .8, c .6, d 0; b and c are terminal and of task B,
    d is of another agent."""
    vectors = {
        "q": (1, 0, 0, 0),
        "a": (1, 0, 0, 0),
        "b": (0.8, 0.6, 0, 0),
        "c": (0.6, 0.8, 0, 0),
        "d": (0, 1, 0, 0),
    }
    buffer = TraceBuffer(tmp_path / "planted", Planted(vectors))
    buffer.add(
        [
            trace(3, key="d", source="other", task_id="D"),
            trace(2, key="c", terminal=True, task_id="B"),
            trace(1, key="b", terminal=True, task_id="B"),
            trace(0, key="a", task_id="A"),
        ]
    )
    return buffer


def keys(found: list[list[tuple[Trace, float]]]) -> list[str]:
    return ["".join(one.key for one, _ in each) for each in found]


def test_the_nearest_come_first(tmp_path: Path) -> None:
    with planted(tmp_path) as buffer:
        found = buffer.search(["q"], 9, allow_terminal=True)
        assert keys(found) == ["abcd"]
        assert [similarity for _, similarity in found[0]] == pytest.approx(
            [1.0, 0.8, 0.6, 0.0], abs=1e-6
        )
        assert keys(buffer.search(["d", "q"], 1, allow_terminal=True)) == ["d", "a"]


def test_filters(tmp_path: Path) -> None:
    with planted(tmp_path) as buffer:
        assert keys(buffer.search(["q"], 9)) == ["ad"]
        assert keys(buffer.search(["q"], 9, min_similarity=0.5)) == ["a"]
        per_key = buffer.search(
            ["q", "q", "q", "q"], 9, allow_terminal=True, exclude_tasks=["B", None, "A", ""]
        )
        assert keys(per_key) == ["ad", "abcd", "bcd", "abcd"]


def test_a_trace_without_a_task_id_is_of_the_task_of_its_question() -> None:
    task = Task(id="t/0", question="r1 of  e1 ?", reference=())
    rows = (("r1 of e1 ?", ""), ("r1 of e1 ?", "w/7"), ("r2 of e5 ?", ""))
    traces = [trace(key=f"{key}\nsearch x", task_id=task_id) for key, task_id in rows]

    def retrieved(**settings: Any) -> list[tuple[str, str]]:
        retriever = BufferRetriever(buffer, BufferSettings(**settings))
        asked = (retriever.retrieve(task, [], whole=False, noise_key=(n,)) for n in range(20))
        found = [asyncio.run(one) for one in asked]
        retriever.close()
        return sorted({(one.traces[0].key[:10], one.task_id) for one in found if one})

    with TraceBuffer(":memory:", "hashing") as buffer:
        buffer.add(traces)
        assert retrieved() == [("r1 of e1 ?", "t/0")]
        # Of another task by its id, whose question is the same: one of another world.
        assert retrieved(allow_same_task=False) == [("r1 of e1 ?", "w/7")]
        others = [("r1 of e1 ?", "w/7"), ("r2 of e5 ?", "")]
        assert retrieved(allow_same_task=False, random_prob=1.0) == others
        assert retrieved(random_prob=1.0) == [("r1 of e1 ?", "t/0"), *others]


def test_equally_near_ones_come_in_the_order_they_were_added(tmp_path: Path) -> None:
    with opened(tmp_path / "b") as buffer:
        buffer.add([trace(number, key="the same key") for number in range(40)])
        found = buffer.search(["the same key"], 5)[0]
        assert [one.task_id for one, _ in found] == [f"task {number}" for number in range(5)]
        assert {similarity for _, similarity in found} == {1.0}


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Makes a folder read-only for the time of the block."""
    if os.geteuid() == 0:
        # Modes do not bind root.
        mount = ["mount", "--bind", str(folder), str(folder)]
        subprocess.run(mount, check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)
        return
    folders = [folder, *(one for one in folder.rglob("*") if one.is_dir())]
    for one in folders:
        one.chmod(0o555)
    try:
        yield
    finally:
        for one in folders:
            one.chmod(0o755)


def test_a_buffer_on_a_read_only_disk_is_read(tmp_path: Path) -> None:
    path = tmp_path / "disk" / "b"
    with opened(path) as buffer:
        buffer.add([trace()])
    with read_only(path.parent):
        for encoder in (None, "hashing"):
            with TraceBuffer(path, encoder) as buffer:
                assert [one for one, _ in buffer.search(["word0"])[0]] == [trace()]
                buffer.copy_to(tmp_path / "copy")
                with raises_code("buffer-busy"):
                    buffer.add([trace(1)])
    with opened(tmp_path / "copy") as buffer:
        assert buffer.add([trace(0), trace(1)]) == 1


def test_what_is_wrong_with_a_search_is_said(tmp_path: Path) -> None:
    with planted(tmp_path) as buffer, raises_code("keys-one-text"):
        buffer.search("q")


def test_draws_are_even_and_functions_of_their_seed(tmp_path: Path) -> None:
    with planted(tmp_path) as buffer:
        first = buffer.draw(range(300))
        assert first == buffer.draw(range(300))
        counts = [sum(one is not None and one.key == key for one in first) for key in "ad"]
        # Fair coin, 300 tosses: more than four standard deviations (8.7) off once in 16,000.
        assert sum(counts) == 300 and abs(counts[0] - 150) < 36
        assert buffer.draw([5, 5], exclude_tasks=["A", "D"]) == [
            trace(3, key="d", source="other", task_id="D"),
            trace(0, key="a", task_id="A"),
        ]
        assert buffer.search(["a", "b"], min_similarity=1.1) == [[], []]
        assert {one.key for one in buffer.draw(range(100), allow_terminal=True) if one} == set(
            "abcd"
        )


# ---------------------------------------------------------------------- trajectories


def steps(num: int, trajectory: str = "t", **changes: object) -> list[Trace]:
    return [
        trace(
            place,
            position=place,
            task_id="A",
            trajectory=trajectory,
            terminal=place == num - 1,
            **changes,
        )
        for place in range(num)
    ]


def test_the_rest_of_a_trajectory(tmp_path: Path) -> None:
    mine = steps(4)
    others = [*steps(4, source="other"), *[replace(one, task_id="B") for one in steps(4)]]
    with opened(tmp_path / "b") as buffer:
        buffer.add([*others, *reversed(mine)])
        assert [buffer.rest(one) for one in mine] == [tuple(mine[place:]) for place in range(4)]


def test_a_step_that_two_trajectories_share_belongs_to_both(tmp_path: Path) -> None:
    one = steps(3, "one")
    two = [
        trace(9, position=0, task_id="A", trajectory="two"),
        replace(one[1], trajectory="two"),
        replace(one[2], trajectory="two", value="x"),
    ]
    with opened(tmp_path / "b") as buffer:
        assert buffer.add([*one, *two]) == 5
        # Stored once, under the first trajectory's name; the second still goes on over it.
        assert buffer.rest(two[0]) == (two[0], one[1], two[2])
        assert buffer.rest(one[0]) == tuple(one)
        assert buffer.stats().num_trajectories == 2


# ---------------------------------------------------------------------- growing and going back


def test_rolling_back_undoes_additions_and_memberships(tmp_path: Path) -> None:
    with opened(tmp_path / "b") as buffer:
        buffer.add(steps(3))
        buffer.add([trace(7, source="policy")], update=1)
        before = (list(buffer), buffer.checksum(), buffer.stats())
        buffer.add([trace(8, source="policy"), replace(steps(3)[1], trajectory="later")], update=2)
        buffer.roll_back(1)
        after = (
            list(buffer),
            buffer.checksum(),
            replace(buffer.stats(), num_bytes=before[2].num_bytes),
        )
        assert after == before
        assert buffer.search([trace(7).key])[0][0][0] == trace(7, source="policy")
    with opened(tmp_path / "b") as buffer:
        assert list(buffer) == before[0]


@at_most(25)
@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=8), st.integers(0, 8))
def test_a_cut_buffer_equals_one_that_never_went_further(
    additions: list[list[int]], cut: int
) -> None:
    def play(buffer: TraceBuffer, some: Sequence[tuple[int, list[int]]]) -> None:
        for update, numbers in some:
            buffer.add([trace(one, policy_version=update) for one in numbers], update=update)

    numbered = list(enumerate(additions, start=1))
    with (
        tempfile.TemporaryDirectory() as folder,
        opened(Path(folder) / "a") as cut_back,
        opened(Path(folder) / "b") as plain,
    ):
        play(cut_back, numbered)
        cut_back.roll_back(cut)
        play(plain, numbered[:cut])
        for _ in range(2):
            assert list(cut_back) == list(plain) and cut_back.checksum() == plain.checksum()
            assert cut_back.draw(range(5)) == plain.draw(range(5))
            # And they go on alike.
            play(cut_back, numbered[cut:])
            play(plain, numbered[cut:])


# ---------------------------------------------------------------------- numbers and copies


def test_a_copy_is_a_buffer_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "b") as buffer:
        buffer.add([trace(0)])
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "copy").write_text("what was there")
        buffer.copy_to(tmp_path / "folder" / "copy")
        buffer.add([trace(1)])
        with TraceBuffer.open_as_built(tmp_path / "folder" / "copy") as copy:
            assert list(copy) == [trace(0)] and copy.encoder_name == "hashing"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["copy"]


def test_a_copy_that_fails_leaves_nothing_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(partial: Path, update: int | None) -> None:
        partial.with_name(f"{partial.name}-journal").touch()
        raise OSError("disk full")

    with opened(tmp_path / "b") as buffer:
        (tmp_path / "folder").mkdir()
        monkeypatch.setattr(buffer._file, "back_up", fails)
        for name in ("copy", "[copy]*"):
            with pytest.raises(OSError, match="disk full"):
                buffer.copy_to(tmp_path / "folder" / name)
    assert not [*(tmp_path / "folder").iterdir()]


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"value": ""}, "value is empty"),
        ({"value": " \n"}, "value is empty"),
        ({"value": StepContent()}, "value is empty"),
        ({"key": "\n"}, "key is empty"),
        ({"reward": float("nan")}, "reward is nan"),
        ({"position": -1}, "position is -1"),
    ],
)
def test_a_useless_trace_is_refused_and_nothing_added(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with opened(tmp_path / "b") as buffer:
        with raises_code("trace-invalid"):
            buffer.add([trace(0), trace(5, **changes)])
        assert len(buffer) == 0


def test_another_encoder_is_refused_and_both_are_named(tmp_path: Path) -> None:
    with opened(tmp_path / "b") as buffer:
        buffer.add([trace(0)])
    with raises_code(
        "buffer-other-encoder", match=r"'hashing' \(512 dimensions\).*'minilm'.*take \"hashing\""
    ):
        TraceBuffer(tmp_path / "b")
    with raises_code("buffer-other-encoder", match=r"'hashing' \(512 dimensions\).*'planted'"):
        TraceBuffer(tmp_path / "b", Planted({}))


def test_an_encoder_that_changed_under_its_name_is_found_out(tmp_path: Path) -> None:
    with TraceBuffer(tmp_path / "b", Planted({})) as buffer:
        buffer.add([trace(0)])
    changed = Planted({})
    changed.dim = 3
    with (
        TraceBuffer(tmp_path / "b", changed) as buffer,
        raises_code("encoder-changed"),
    ):
        buffer.search(["q"])


def test_vectors_that_are_none_are_refused(tmp_path: Path) -> None:
    for number, vector in enumerate([(np.nan, 0, 0, 0), (2, 0, 0, 0)]):
        with (
            TraceBuffer(tmp_path / str(number), Planted({"bad": vector})) as buffer,
            raises_code("vectors-invalid"),
        ):
            buffer.add([trace(0, key="bad")])


def foreign(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE notes (text)")
    connection.close()


def newer(path: Path) -> None:
    opened(path).close()
    connection = sqlite3.connect(path)
    connection.execute("UPDATE meta SET value = 99 WHERE name = 'format'")
    connection.commit()
    connection.close()


def filled(path: Path) -> None:
    with opened(path) as buffer:
        buffer.add([trace(number) for number in range(300)])


def cut_off(path: Path) -> None:
    filled(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def overwritten(path: Path) -> None:
    filled(path)
    data = bytearray(path.read_bytes())
    data[4096:] = random.Random(0).randbytes(len(data) - 4096)
    path.write_bytes(data)


def without_vectors(path: Path) -> None:
    filled(path)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM vectors WHERE id > 200")
    connection.commit()
    connection.close()


def with_a_vector_that_is_none(path: Path) -> None:
    """As a flipped byte in the row's head leaves it: SQLite looks at NOT NULL when it writes."""
    filled(path)
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (id INTEGER PRIMARY KEY, vector)")
    connection.execute("INSERT INTO other SELECT id, nullif(id, 9) FROM vectors")
    connection.execute(
        "UPDATE other SET vector = (SELECT vector FROM vectors v WHERE v.id = other.id)"
        " WHERE vector IS NOT NULL"
    )
    connection.execute("DROP TABLE vectors")
    connection.execute("ALTER TABLE other RENAME TO vectors")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (
            lambda path: path.write_text("no database, but long enough for a header " * 9),
            "buffer-foreign",
        ),
        (foreign, "buffer-foreign"),
        (newer, "buffer-version"),
        (cut_off, "buffer-damaged"),
        (overwritten, "buffer-damaged"),
        (without_vectors, "buffer-damaged"),
        (with_a_vector_that_is_none, "buffer-damaged"),
        (lambda path: path.mkdir(), "buffer-is-folder"),
        (lambda path: path.write_bytes(b""), "buffer-file-empty"),
        (lambda path: None, "buffer-missing"),
    ],
)
def test_what_is_no_buffer_is_refused_with_a_reason(
    tmp_path: Path, make: Callable[[Path], object], code: str
) -> None:
    make(tmp_path / "b")
    with raises_code(code):
        TraceBuffer.open_as_built(tmp_path / "b")


# ---------------------------------------------------------------------- threads and kills


def test_one_thread_may_add_while_others_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_module, "CHUNK", 8)
    traces = [trace(number) for number in range(400)]
    problems = []
    with opened(tmp_path / "b") as buffer:
        buffer.add(traces[:8])

        def search() -> None:
            try:
                while len(buffer) < len(traces):
                    assert buffer.search([traces[3].key, traces[5].key])[1][0][0] == traces[5]
                    assert buffer.draw([1])[0] in traces
            except Exception as error:
                problems.append(error)

        threads = [threading.Thread(target=search) for _ in range(2)]
        for thread in threads:
            thread.start()
        buffer.add(traces)
        for thread in threads:
            thread.join()
    assert problems == []


def test_additions_whose_reading_fails_are_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "b") as buffer:
        buffer.add([trace(0)])
        assert len(buffer) == 1
        assert buffer.add([trace(1)]) == 1

        def fails(*_: object) -> None:
            raise OSError("no such page")

        with monkeypatch.context() as patch:
            patch.setattr(TraceFile, "vectors", fails)
            with pytest.raises(OSError, match="no such page"):
                buffer.search([trace(1).key])
        assert buffer.search([trace(1).key])[0][0][0] == trace(1)
        assert len(buffer) == 2


def together(num: int, work: Callable[[int], object]) -> None:
    """Runs work(0), work(1), ... at once, each in a thread; what one raises is raised."""
    barrier = threading.Barrier(num)
    errors = list[BaseException]()

    def one(number: int) -> None:
        barrier.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_several_writers_add_each_trace_once_and_see_what_others_added(tmp_path: Path) -> None:
    """Each with a connection of its own, as in processes of their own."""
    traces = [trace(number) for number in range(400)]
    counts = [0, 0, 0]
    with (
        opened(tmp_path / "b") as first,
        opened(tmp_path / "b") as second,
        opened(tmp_path / "b") as third,
    ):
        buffers = [first, second, third]

        def add(number: int) -> None:
            counts[number] = buffers[number].add(traces)

        together(3, add)
        assert sum(counts) == 400
        for buffer in buffers:
            assert buffer.add(traces) == 0 and len(buffer) == 400
            assert buffer.search([traces[7].key])[0][0][0] == traces[7]
    with opened(tmp_path / "b") as buffer:
        assert len(buffer) == 400 and buffer.stats().num_trajectories == 400


def check_after_a_kill(path: Path, committed: int) -> int:
    """Returns how many traces are in the file: all that were acknowledged, in whole chunks, in
    order, and each findable."""
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    with opened(path) as buffer:
        found = list(buffer)
        source = endless()
        assert found == [next(source) for _ in found]
        assert len(found) >= committed and len(found) % CHUNK == 0
        if found:
            assert buffer.search([found[-1].key])[0][0] == (found[-1], 1.0)
    return len(found)


def kill_while_adding(path: Path, after_s: float) -> int:
    """Returns how many traces the killed process had said were committed."""
    command = [sys.executable, "-m", "tests.support.killed_adds", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(after_s)
    process.kill()
    rest = process.stdout.read()
    process.stdout.close()
    process.wait()
    # The kill may have cut the last line.
    return int((first + rest).split("\n")[-2])


def test_a_kill_while_adding_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    delays = random.Random(0)
    stored = 0
    for _ in range(3):
        committed = kill_while_adding(tmp_path / "b", delays.uniform(0, 0.2))
        before = stored
        stored = check_after_a_kill(tmp_path / "b", committed)
        assert stored > before
