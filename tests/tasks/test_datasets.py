"""Data sets: small files with one defect each, and the papers' real files where they are at
hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.error_codes import raises_code

from treegraft.settings.tasks import DatasetSettings, TasksSettings
from treegraft.tasks.build import build_tasks
from treegraft.tasks.datasets import DatasetSource
from treegraft.tasks.readers import BadRow, Row, read_rows, source_names, words_in

DATA = Path(
    os.environ.get("TREEGRAFT_DATA") or Path(__file__).parents[2] / ".." / "shared" / "data"
)
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason=f"the papers' data sets are not at {DATA} (TREEGRAFT_DATA)"
)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(num: int) -> list[dict[str, Any]]:
    return [{"question": f"{n} + 1 ?", "answer": n + 1} for n in range(num)]


def load(train: str, num_train: int = 100, num_eval: int = 2, **settings: Any) -> DatasetSource:
    return DatasetSource(
        DatasetSettings(train=[train], **settings), num_train=num_train, num_eval=num_eval
    )


def test_the_last_rows_are_held_out(tmp_path: Path) -> None:
    source = load(write(tmp_path / "sums.jsonl", rows(5)))
    assert [task.id for task in source.train_tasks()] == ["sums/0", "sums/1", "sums/2"]
    assert [task.id for task in source.eval_tasks()] == ["sums/3", "sums/4"]
    assert source.train_tasks()[2].question == "2 + 1 ?"
    assert source.train_tasks()[2].reference == ("3",)
    assert source.report() == ()
    assert len(load(str(tmp_path / "sums.jsonl"), num_train=1).train_tasks()) == 1


def test_evaluation_files_leave_all_rows_to_training(tmp_path: Path) -> None:
    train = write(tmp_path / "a.jsonl", rows(3))
    held_out = write(tmp_path / "b.jsonl", rows(4)[1:])
    source = load(train, eval=[held_out])
    assert len(source.train_tasks()) == 3
    assert [task.id for task in source.eval_tasks()] == ["b/0", "b/1"]
    # "1 + 1 ?" and "2 + 1 ?" are in both.
    (sentence,) = source.report()
    assert "also occur in the training files: 2" in sentence


def test_too_few_rows_to_hold_out(tmp_path: Path) -> None:
    with raises_code("one-row"):
        load(write(tmp_path / "a.jsonl", rows(1))).train_tasks()
    # The default of num_eval is larger than many a first file: a fifth is held out, and said.
    source = load(write(tmp_path / "b.jsonl", rows(10)), num_eval=200)
    assert [task.id for task in source.eval_tasks()] == ["b/8", "b/9"]
    assert [task.id for task in source.train_tasks()] == [f"b/{n}" for n in range(8)]
    assert "only 10 usable rows: the last 2 are held out, and 8 train" in source.report()[0]


def test_every_kind_of_reference(tmp_path: Path) -> None:
    answers = [7, "x", ["NYC", "New York", "NYC", ""], 2.5, "so\n#### 1,000", True]
    path = write(
        tmp_path / "a.jsonl",
        [{"question": f"q{n}", "answer": answer} for n, answer in enumerate(answers)],
    )
    tasks = load(path, eval=[path]).train_tasks()
    assert [task.reference for task in tasks] == [
        ("7",),
        ("x",),
        ("NYC", "New York"),
        ("2.5",),
        ("so\n#### 1,000",),
        ("True",),
    ]
    marked = load(path, eval=[path], reference_after="####")
    assert [task.reference for task in marked.train_tasks()] == [("1,000",)]
    assert (
        "5 rows without the mark of tasks.dataset.reference_after were left out"
        in marked.report()[0]
    )


def test_dots_reach_into_structs_and_other_columns_travel(tmp_path: Path) -> None:
    row = {"info": {"q": "who?", "level": 3}, "truth": {"a": "me"}, "kind": "qa", "source": "web"}
    path = write(tmp_path / "a.jsonl", [row])
    settings = {
        "question_column": "info.q",
        "reference_column": "truth.a",
        "category_column": "kind",
    }
    (task,) = load(path, eval=[path], **settings).train_tasks()
    assert (task.question, task.reference, task.category) == ("who?", ("me",), "qa")
    assert task.columns["source"] == "web"
    assert task.columns["info"]["level"] == 3


def test_defects_are_counted_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = rows(2)
    lines = [
        json.dumps(good[0]),
        json.dumps({"question": "blank?", "answer": "  "}),
        json.dumps({"question": "none?", "answer": None}),
        json.dumps({"question": " ", "answer": "1"}),
        "{not json",
        "[1, 2]",
        json.dumps(good[0]),
        json.dumps(good[0] | {"answer": "other"}),
        json.dumps({"question": "\x0crac?", "answer": "1"}),
        json.dumps({"answer": "1"}),
        "",
        json.dumps(good[1]),
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(lines).encode() + b'\n{"question": "\xff"}\n')
    source = load(str(path), eval=[str(path)])
    assert [task.question for task in source.train_tasks()] == [
        "0 + 1 ?",
        "0 + 1 ?",
        "\x0crac?",
        "1 + 1 ?",
    ]
    report = "\n".join(load(str(path), num_eval=1).report())
    for sentence in (
        "a.jsonl: line 5 is not JSON",
        "a.jsonl: line 6 is a JSON list",
        "a.jsonl: line 13 is not JSON",
        "a.jsonl: 2 rows without a reference were left out",
        "a.jsonl: 1 row without a question was left out",
        "a.jsonl: 1 row with a question and reference that occurred before was left out",
        "a.jsonl: 1 row with a question that occurred before but another reference was kept",
        "a.jsonl: 1 row without a column that the settings name was left out",
    ):
        assert sentence in report


def test_nan_is_a_missing_value(tmp_path: Path) -> None:
    nan = float("nan")
    lines = [*rows(2), {"question": nan, "answer": "1"}, {"question": "2 ?", "answer": nan}]
    path = write(tmp_path / "a.jsonl", [{"kind": nan, **line} for line in lines])
    source = load(path, eval=[path], category_column="kind")
    assert [(task.question, task.category) for task in source.train_tasks()] == [
        ("0 + 1 ?", ""),
        ("1 + 1 ?", ""),
    ]
    assert "a.jsonl: 1 row without a question was left out" in source.report()
    assert "a.jsonl: 1 row without a reference was left out" in source.report()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        (
            {"question_column": "qestion"},
            "column-missing",
        ),
        ({"reference_column": "truth.a"}, "column-missing"),
        ({"category_column": "kind"}, "column-missing"),
        ({"reference_after": "####"}, "no-usable-row"),
    ],
)
def test_what_no_row_has_is_an_error(tmp_path: Path, settings: dict[str, str], code: str) -> None:
    with raises_code(code):
        load(write(tmp_path / "a.jsonl", rows(3)), **settings).train_tasks()


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_no_rows_are_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("[]" if name == "a.json" else "\n")
    with raises_code("no-rows-in-file"):
        load(str(tmp_path / name)).train_tasks()


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "train.jsonl", rows(3))
    with raises_code("data-missing"):
        load(str(tmp_path / "tran.jsonl")).train_tasks()
    monkeypatch.delenv("NO_SUCH_PLACE", raising=False)
    with raises_code("path-variable-unset"):
        load("$NO_SUCH_PLACE/a.jsonl").train_tasks()
    with raises_code("file-kind-unknown"):
        load(str(tmp_path / "a.tsv") if (tmp_path / "a.tsv").write_text("x") else "").train_tasks()
    (tmp_path / "a.json").write_text("[{]")
    with raises_code("data-no-json"):
        load(str(tmp_path / "a.json")).train_tasks()
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing else")
    with raises_code("parquet-unreadable"):
        load(str(tmp_path / "a.parquet")).train_tasks()
    with raises_code("dataset-unnamed"):
        DatasetSource(DatasetSettings(), num_train=1, num_eval=1)


def test_csv_has_texts_below_a_line_of_names(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('\ufeffquestion,answer,level\n"a, ""b""\nc?",2,x\n\nshort,1\nd?,3,\n')
    found = list(read_rows(str(path), "train"))
    assert [row.values for row in found if isinstance(row, Row)] == [
        {"question": 'a, "b"\nc?', "answer": "2", "level": "x"},
        {"question": "d?", "answer": "3", "level": ""},
    ]
    assert [row.number for row in found if isinstance(row, Row)] == [0, 2]
    assert found[1] == BadRow("row 1 has not a cell for each column; it was left out")
    path.write_text("question,answer\n" + "w" * 200_000 + ",1\n")  # beyond the module's own limit
    assert len(list(read_rows(str(path), "train"))) == 1
    for content in (b'question,answer\na,1\n"b,2\n', b"question,answer\na,1\n\xff,2\n"):
        path.write_bytes(content)
        with raises_code("csv-unreadable", match=r"cannot be read as CSV after . rows"):
            list(read_rows(str(path), "train"))
    path.write_text("question,answer,answer\na,1,2\n")
    with raises_code("columns-repeated"):
        list(read_rows(str(path), "train"))


def test_variables_json_and_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "a.json").write_text(json.dumps(rows(4)))
    pq.write_table(pa.Table.from_pylist(rows(4)), tmp_path / "b.parquet")
    monkeypatch.setenv("MY_DATA", str(tmp_path))
    first = load("$MY_DATA/a.json")
    second = load("${MY_DATA}/b.parquet")
    assert [task.reference for task in first.train_tasks()] == [
        task.reference for task in second.train_tasks()
    ]
    assert second.eval_tasks()[0].id == "b/2"


def test_the_hub_is_read_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(name: str, *, split: str) -> Any:
        if (name, split) != ("someone/sums", "validation"):
            raise FileNotFoundError(name)
        return datasets.Dataset.from_list(rows(3))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = load("hub:someone/sums:validation")
    assert [task.id for task in source.train_tasks()] == ["someone/sums/validation/0"]
    with raises_code("hub-set-not-loaded"):
        load("hub:someone/else").train_tasks()


def test_sources_of_the_same_name_have_ids_of_their_own(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
    settings = DatasetSettings(
        train=[
            write(tmp_path / "a" / "x.jsonl", rows(2)),
            write(tmp_path / "b" / "x.jsonl", rows(4)),
        ]
    )
    source = DatasetSource(settings, num_train=9, num_eval=1)
    # The second file repeats the first one's two rows.
    assert [task.id for task in source.train_tasks()] == ["x/0", "x/1", "x-2/2"]
    # Also where the second one's name is that of a third file.
    names = source_names(["a/x.jsonl", "b/x.jsonl", "x-2.jsonl", "a/x.jsonl", "c/x.csv"])
    assert [*names.values()] == ["x", "x-2", "x-2-2", "x-3"]


def test_a_data_set_has_no_expert(tmp_path: Path) -> None:
    source = load(write(tmp_path / "a.jsonl", rows(3)))
    assert source.expert(source.train_tasks()[0], 0) is None
    assert source.warmup_tasks(3, 0) == () and source.tools() == ()


@needs_data
def test_the_papers_training_questions() -> None:
    settings = DatasetSettings(
        train=[str(DATA / "rl" / "train_10k.parquet")],
        eval=[str(DATA / "rl" / "valid.parquet")],
        question_column="extra_info.question",
        reference_column="reward_model.ground_truth",
        category_column="ability",
    )
    source = build_tasks(
        TasksSettings(kind="dataset", num_train=20_000, num_eval=200, dataset=settings), seed=0
    )
    # 10,000 rows; 1 has no reference; of the 38 repeated questions 29 repeat the reference too.
    assert len(source.train_tasks()) == 9970
    assert len(source.eval_tasks()) == 180
    assert {task.category for task in source.train_tasks()} == {"math", "qa"}
    report = source.report()
    assert "train_10k.parquet: 1 row without a reference was left out" in report
    assert (
        "train_10k.parquet: 29 rows with a question and reference that occurred before were"
        " left out" in report
    )


def test_columns_are_found_in_any_case_the_exact_name_first(tmp_path: Path) -> None:
    data = [{"Question": "q0", "Answer": "a0"}, {"question": "q1", "Question": "no", "answer": 1}]
    path = write(tmp_path / "a.jsonl", data)
    tasks = load(path, eval=[path]).train_tasks()
    assert [(task.question, task.reference) for task in tasks] == [("q0", ("a0",)), ("q1", ("1",))]


def test_words_of_a_file_are_those_of_all_its_texts_without_tags(tmp_path: Path) -> None:
    chat = [{"role": "assistant", "content": "<think>so</think> <python>print(6 * 7)</python>"}]
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({"messages": chat, "reward": 1}) + "\nno JSON\n", encoding="utf-8")
    assert words_in(str(path)) == ["*", "7)", "assistant", "print(6", "so"]
