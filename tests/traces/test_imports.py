"""Trajectories from files: each shape of row by hand, and what a broken line does to the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code
from tests.support.viewed import as_lines

from treegraft.core.types import (
    GraftCause,
    Leaf,
    Observation,
    Origin,
    StartCause,
    Status,
    Step,
    StepContent,
    Task,
    ToolCall,
    Trace,
    Tree,
)
from treegraft.rollout.formats.tags import read_trajectory
from treegraft.runs.tree_files import write_trees
from treegraft.traces.buffer import TraceBuffer
from treegraft.traces.imports import (
    ImportReport,
    import_files,
    read_messages,
    read_steps,
)


def step(body: str, result: str, thought: str = "", name: str = "search") -> StepContent:
    return StepContent(
        thought=thought, calls=(ToolCall(name, body),), observations=(Observation(text=result),)
    )


LOOKED_UP = step("e9 r2", "r2 of e9 is e41")


def load(tmp_path: Path, rows: list[Any], **options: Any) -> tuple[ImportReport, list[Trace]]:
    """Imports rows: objects as JSON, bytes as they are."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(
        b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    )
    with TraceBuffer(tmp_path / "b", "hashing") as buffer:
        return import_files([path], buffer, **options), list(buffer)


# Tag text


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (
            (
                "<search> e9 r2 </search><result> r2 of e9 is e41 </result><answer> \\boxed{ e41 }"
                " </answer><|im_end|>"
            ),
            (LOOKED_UP, StepContent(answer="e41")),
        ),
        (
            "so <think>a</think> then\n<answer>e41</answer>",
            (StepContent(thought="so\na\nthen", answer="e41"),),
        ),
        (
            "<think>a</think><browse>b</browse>\n<result>c</result> <result>d</result>",
            (
                StepContent(
                    thought="a",
                    calls=(ToolCall("browse", "b"),),
                    observations=(Observation(text="c"), Observation(text="d")),
                ),
            ),
        ),
        (
            "<b>bold</b> <i> x <search>q</search><result>r</result>",
            (step("q", "r", thought="<b>bold</b> <i> x"),),
        ),
        (
            "<search>q</search><result>r</result><retrieve><search>z</search><result>z</result></retrieve><answer>1</answer>",
            (step("q", "r"), StepContent(answer="1")),
        ),
        ("<search>q</search><result>r</result><search>lost", (step("q", "r"),)),
        (
            "<think>a</think>\n<search> q </search>\n\n<information>Doc 1 r</information>\n\n"
            "<think>b</think><search>s</search><information>t</information><answer> 1 </answer>",
            (step("q", "Doc 1 r", "a"), step("s", "t", "b"), StepContent(answer="1")),
        ),
        (
            "<information>q</information><result>r</result>",
            (step("q", "r", name="information"),),
        ),
        (
            "<search>q</search> <python>p</python><result>r</result>",
            (step("p", "r", "<search>q</search>", name="python"),),
        ),
    ],
)
def test_tag_text_is_read(text: str, steps: tuple[StepContent, ...]) -> None:
    assert read_trajectory(text) == steps


@pytest.mark.parametrize(
    "text",
    [
        "<code>print(1)</code>\n<interpreter>1</interpreter>",
        '<tool_call>{"name": "search"}</tool_call><tool_response>r</tool_response>',
        "<|begin_of_query|>q<|end_of_query|> <|begin_of_documents|>r<|end_of_documents|>",
        "<search>q</search><information>about </result></information>",
    ],
)
def test_calls_and_results_in_unknown_tags_are_refused(text: str) -> None:
    """As a thought, they would teach the agent to write the words of a tool."""
    with pytest.raises(ValueError, match="expected a call in a tag of its own and its result in"):
        read_trajectory(f"<think>a</think>{text}<answer>1</answer>")


# Messages


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_messages_with_tool_calls() -> None:
    messages = [
        {"role": "system", "content": "be good"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "r2 of "}, {"type": "text", "text": "e9 ?"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("search", '{"query": "e9 r2"}')],
        },
        {"role": "tool", "tool_call_id": "1", "content": "r2 of e9 is e41"},
        {"role": "assistant", "content": "<think>so</think>It is \\boxed{e41}."},
    ]
    assert read_messages(messages) == (
        "r2 of e9 ?",
        (LOOKED_UP, StepContent(thought="so", answer="e41")),
    )


def test_arguments_that_are_not_one_text_stay_json() -> None:
    several = [
        call("f", '{"a": 1, "b": "x"}'),
        call("g", {"a": "x"}),
        call("h", "no json"),
        call("i", ""),
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": several},
    ]
    shown = [{"role": "tool", "content": text} for text in ("1", "2", "3", "4")]
    (one,), question = reversed(read_messages([*messages, *shown]))
    assert question == "q"
    assert one.thought == "hm"
    assert [(c.name, c.body) for c in one.calls] == [
        ("f", '{"a": 1, "b": "x"}'),
        ("g", "x"),
        ("h", "no json"),
        ("i", ""),
    ]
    assert [o.text for o in one.observations] == ["1", "2", "3", "4"]


def test_results_of_parallel_calls_are_in_their_order() -> None:
    calls = [call("f", "a") | {"id": "c1"}, call("f", "b") | {"id": "c2"}]
    asked = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}]

    def results(*ids: str) -> list[str]:
        told = [{"role": "tool", "tool_call_id": one, "content": f"of {one}"} for one in ids]
        (step,) = read_messages([*asked, *told])[1]
        return [one.text for one in step.observations]

    assert results("c1", "c2") == ["of c1", "of c2"]
    assert (results("c1"), results("", "")) == (["of c1"], ["of ", "of "])
    for ids in (("c2", "c1"), ("c1", "c3"), ("c1", "c1"), ("c2",)):
        with pytest.raises(ValueError, match="in the order"):
            results(*ids)


def test_messages_with_tags() -> None:
    messages = [
        {"role": "user", "content": "r2 of e9 ?"},
        {"role": "assistant", "content": "<search>e9 r2</search>"},
        {"role": "user", "content": "r2 of e9 is e41"},
        {"role": "assistant", "content": "<search>e9 r2</search>"},
        {"role": "user", "content": "<result>r2 of e9 is e41</result>"},
        {"role": "assistant", "content": "<answer>e41</answer>"},
    ]
    assert read_messages(messages)[1] == (LOOKED_UP, LOOKED_UP, StepContent(answer="e41"))
    messages[4]["content"] = "\n<information>r2 of e9 is e41</information>\n"
    assert read_messages(messages)[1] == (LOOKED_UP, LOOKED_UP, StepContent(answer="e41"))


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no question"),
        ([{"role": "assistant", "content": "hi"}], "the first message has the role 'assistant'"),
        ([{"role": "user", "content": "q"}], "no steps"),
        (
            [{"role": "user", "content": "q"}, {"role": "user", "content": "q"}],
            "a second question, 'q'; expected one",
        ),
        (
            [{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}],
            "a tool's message without a call",
        ),
        (
            [{"role": "user", "content": "q"}, {"role": "asistant", "content": "a"}],
            "the role 'asistant' .expected system, .*, tool; did you mean 'assistant'",
        ),
        ([{"role": "user", "content": 7}], "something other than text"),
    ],
)
def test_conversations_that_are_no_trajectory_are_refused(messages: list[Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_messages(messages)


# Rows of steps, and files


def test_rows_of_steps() -> None:
    rows = [
        {"calls": [{"name": "search", "body": "e9 r2"}], "observations": ["r2 of e9 is e41"]},
        {"thought": "so", "answer": "e41"},
    ]
    assert read_steps(rows) == (LOOKED_UP, StepContent(thought="so", answer="e41"))


def test_a_broken_line_is_named_and_the_others_are_imported(tmp_path: Path) -> None:
    good = {
        "question": "r2 of e9 ?",
        "text": "<search>e9 r2</search><result>r2 of e9 is e41</result><answer>e41</answer>",
    }
    bad = {
        b'{"question": ': "not JSON: Expecting value at column 13",
        b"\xff\xfe": "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        b"[1]": "a list, expected an object",
        b'{"question": "q"}': "neither messages, conversations, steps nor text",
        b'{"text": "<answer>1</answer>"}': "no 'question'",
        b'{"question": " ", "text": "<answer>1</answer>"}': "an empty question",
        b'{"question": 7, "text": "<answer>1</answer>"}': "question is 7, expected text",
        b'{"question": "q", "steps": []}': "no steps",
        b'{"question": "q", "steps": [{}]}': "step 1 says nothing",
        b'{"question": "q", "steps": [{"calls": [{"name": "a"}]}]}': "no 'body'",
        b'{"question": "q", "text": "<answer>1</answer>", "reward": "high"}': (
            "could not convert string to float: 'high'"
        ),
        b'{"question": "q", "text": "<answer>1</answer>", "reward": NaN}': "the reward is nan",
        b'{"question": "q", "steps": 7}': "'int' object is not iterable",
        b"[" * 100_000: "",
    }
    rows: list[Any] = [good]
    for line in bad:
        rows += [line, b"", {**good, "question": f"r2 of e{len(rows)} ?"}]
    report, traces = load(tmp_path, rows)
    assert (report.num_trajectories, len(traces)) == (1 + len(bad), 2 * (1 + len(bad)))
    assert [problem.line for problem in report.problems] == [2 + 3 * n for n in range(len(bad))]
    for problem, reason in zip(report.problems, bad.values(), strict=True):
        assert problem.reason.startswith(reason), problem
        assert problem.reason
    assert (
        str(report.problems[0])
        == f"{tmp_path / 'rows.jsonl'}, line 2: not JSON: Expecting value at column 13"
    )


def test_reward_task_and_source_of_rows(tmp_path: Path) -> None:
    def row(number: int, **more: Any) -> dict[str, Any]:
        return {"question": f"q {number} ?", "text": f"<answer>{number}</answer>", **more}

    rows = [
        row(0),
        row(1, reward=0.25, task_id=7),
        row(2, reward=0.75, task_id=7),
        row(3, reward=0.5, task_id=7),
        row(4, reward=-1.0, task_id=8),
        row(5, reward=None, task_id="x"),
    ]
    report, traces = load(tmp_path, rows, num_best=2)
    assert [(t.key, t.reward, t.task_id, t.source) for t in traces] == [
        ("q 0 ?", 1.0, "", "rows"),
        ("q 2 ?", 0.75, "7", "rows"),
        ("q 3 ?", 0.5, "7", "rows"),
        ("q 5 ?", 1.0, "x", "rows"),
    ]
    assert (report.num_trajectories, report.num_surplus, report.num_too_low, report.num_new) == (
        6,
        1,
        1,
        4,
    )
    assert len({t.trajectory for t in traces}) == 4


# Our own runs


def tree(task_id: str, rewards: list[float | None], graft: bool = False) -> Tree:
    """A search and an answer per reward; failed where it is None."""

    def made(step_id: str, content: StepContent, origin: Origin) -> Step:
        parent = step_id.rpartition(".")[0] or None
        return Step(
            id=step_id,
            parent=parent,
            depth=step_id.count("."),
            token_ids=(1,),
            origins=(origin,),
            loss_mask=(False,),
            sampling_logprobs=(0.0,),
            entropies=(0.0,),
            content=content,
            cause=(
                GraftCause(source="s", task_id="", reward=1.0, similarity=1.0)
                if origin is Origin.RETRIEVED
                else StartCause()
            ),
        )

    steps = [made("0", StepContent(thought=f"{task_id} ?"), Origin.PROMPT)]
    leaves = []
    for start, reward in enumerate(rewards):
        origin = Origin.RETRIEVED if graft else Origin.POLICY
        steps.append(made(f"0.{start}", step(f"e{start}", "r", thought=task_id), Origin.POLICY))
        steps.append(made(f"0.{start}.0", step(f"e{start}", "r", thought="b"), origin))
        status = Status.FAILED if reward is None else Status.COMPLETED
        steps.append(made(f"0.{start}.0.0", StepContent(answer=str(start)), Origin.POLICY))
        leaves.append(
            Leaf(step_id=f"0.{start}.0.0", status=status, reward=reward, answer=str(start))
        )
    task = Task(id=task_id, question=f"{task_id} ?", reference=())
    return Tree(task=task, group_id=task_id, steps=tuple(steps), leaves=tuple(leaves))


def test_a_run_folder_gives_the_best_of_each_task_in_all_its_updates(tmp_path: Path) -> None:
    run = tmp_path / "first_run"
    write_trees(run / "trees" / "update-000001", [tree("a", [0.5, None, 0.0]), tree("b", [-1.0])])
    write_trees(run / "trees" / "update-000002", [tree("a", [1.0, 0.25, 0.75])])
    with as_lines(run).open("a") as file:
        file.write('{"group_id": "x", "leaves": [], "steps": []}\n')
    (run / "trees" / "eval-000002-greedy.jsonl").write_text("not read\n")
    with TraceBuffer(tmp_path / "b", "hashing") as buffer:
        report = import_files([run], buffer, num_best=2)
        traces = list(buffer)
    assert {(t.task_id, t.reward, t.source, t.trajectory.rpartition(":")[0]) for t in traces} == {
        ("a", 1.0, "first_run", "update-000002:1:0.0.0.0"),
        ("a", 0.75, "first_run", "update-000002:1:0.2.0.0"),
    }
    assert [t.position for t in traces] == [0, 1, 2] * 2
    assert (report.num_trajectories, report.num_too_low, report.num_surplus) == (6, 2, 2)
    assert [(problem.path.name, problem.line) for problem in report.problems] == [
        ("update-000001.jsonl", 3)
    ]


def test_files_of_one_name_keep_their_trajectories_apart(tmp_path: Path) -> None:
    for folder, question in (("a", "one ?"), ("b", "two ?")):
        (tmp_path / folder).mkdir()
        text = f"<search>{question}</search><result>r</result><answer>1</answer>"
        (tmp_path / folder / "chats.jsonl").write_text(
            json.dumps({"question": question, "text": text}) + "\n"
        )
    with TraceBuffer(tmp_path / "buffer", "hashing") as buffer:
        files = [tmp_path / folder / "chats.jsonl" for folder in ("a", "b")]
        assert import_files(files, buffer).num_new == 4
        assert import_files(files, buffer).num_new == 0
        assert buffer.stats().num_trajectories == 2
        assert all(
            len({step.key.partition("\n")[0] for step in steps}) == 1
            for steps in buffer.trajectories()
        )


def test_grafted_steps_of_a_run_are_history_but_no_traces(tmp_path: Path) -> None:
    write_trees(tmp_path / "update-000001.jsonl", [tree("a", [1.0], graft=True)])
    with TraceBuffer(tmp_path / "b", "hashing") as buffer:
        import_files([tmp_path / "update-000001.jsonl"], buffer)
        first, last = buffer
    assert (first.position, last.position) == (0, 2)
    assert last.key == "a ?\na\nsearch e0\nr\nb\nsearch e0\nr"


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere.jsonl", "import-missing"), (".", "import-folder-invalid")]
)
def test_a_path_with_nothing_to_read_is_refused_before_any_work(
    tmp_path: Path, name: str, code: str
) -> None:
    good = tmp_path / "good.jsonl"
    good.write_text('{"question": "q ?", "text": "<answer>1</answer>"}\n')
    with TraceBuffer(tmp_path / "b", "hashing") as buffer:
        with raises_code(code):
            import_files([good, tmp_path / name], buffer)
        assert len(buffer) == 0
