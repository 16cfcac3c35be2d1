"""A few lines with each name of `treegraft` and `treegraft.parts` that docs/api.md and
docs/parts.md have no example of."""

from __future__ import annotations

from pathlib import Path

import pytest

from treegraft.parts import Settings, setting

pytestmark = pytest.mark.smoke


def test_trees_and_causes() -> None:
    """Answers of an explorer, causes of steps, leaves."""
    from treegraft import Status
    from treegraft.parts import (
        Below,
        Branch,
        BranchCause,
        Expand,
        GraftCause,
        Leaf,
        Observation,
        RestartCause,
        Retry,
        RetryCause,
        Start,
        Stored,
        StoredCause,
        ToolCall,
    )

    assert not Status.FAILED.rule.in_group and Status.TRUNCATED.rule.in_group  # of the group's mean

    why = BranchCause(entropy_change=0.2, probability=0.6, rule="mine")
    proposals = [
        Start(4),
        Branch(2, why),
        Expand("0.1", 1, why),
        Retry("0.1.0", 2, "mine"),
        Start(2, Below(0, 1, "mine")),
    ]
    assert proposals[0].num == 4 and proposals[2].step_id == "0.1"

    assert len({GraftCause, RestartCause, RetryCause, StoredCause, BranchCause}) == 5
    assert RetryCause(rule="mine", beside="0.1.0").beside == "0.1.0"
    assert Stored(source="expert", reward=1.0, num_steps=3, has_answer=True).num_steps == 3
    assert Leaf(step_id="0.1.0", status=Status.COMPLETED).reward is None
    assert ToolCall(name="search", body="r3 of e9").name == "search" and Observation(text="e4").text


def test_explorers_and_randomness() -> None:
    """What an explorer sees, and chance that repeats."""
    from treegraft import load_config
    from treegraft.parts import (
        EntropyBranching,
        ExplorerFacts,
        Independent,
        PathView,
        interfaces,
        keyed,
    )

    key: interfaces.NoiseKey = (0, "train", 3, "task-7", "0.1")
    assert keyed.keyed_unit(*key, "mine") == keyed.keyed_unit(*key, "mine")
    assert 0 <= keyed.keyed_unit(*key) < 1
    assert keyed.keyed_choice(["a", "b"], *key) in ("a", "b") and keyed.keyed_int(*key) >= 0

    class Often(Independent):
        probe_tokens = 0

        def after_probe(self, path: PathView, probe):
            return None

    facts = ExplorerFacts(vocab_size=1000)
    entropy = load_config("demo").explore.entropy
    arpo = EntropyBranching(entropy, vocab_size=facts.vocab_size)
    assert arpo.starts(8).num == entropy.num_starts and Often().starts(8).num == 8


class MineSettings(Settings):
    """A table of settings."""

    rate: float = setting(0.5, ge=0, le=1)
    """Share of something."""


def test_settings_and_extensions() -> None:
    """Tables of settings, their checks, and what an extension registers."""
    from treegraft import load_config
    from treegraft.parts import (
        Contradiction,
        ExplorerKind,
        OutcomeKind,
        Registry,
        Tracked,
        has,
        value_of,
        when,
    )

    assert MineSettings().rate == 0.5 and issubclass(MineSettings, Settings)
    config = load_config("demo")
    assert value_of(config, "explore.num_leaves") == config.explore.num_leaves
    assert has("explore.explorers", "graft")(load_config("demo", ['explorers=["graft"]'])) == ""
    assert "engine.kind is 'native'" in when("engine.kind", "vllm")(config)
    fault = Contradiction(("mine.rate",), "mine.rate: got 1, expected less")
    assert fault == Contradiction(("mine.rate",), "mine.rate: got 1, expected less")

    def compare(members, eps):
        return [path.reward - 0.5 for path in members]

    registry = Registry("mine")
    registry.explorer("mine", ExplorerKind(make="mine:make", title="Mine", branches=True))
    registry.credit("half", OutcomeKind(compare=compare))
    registry.part("tracker", "mine", "mine:Tracker", {"module": "json", "install": "mine"})
    registry.part("placement", "mine", "mine:place", {"command": "train"})
    registry.command("mine", "mine:hello", help="Say hello.")
    seams = [entry.seam for entry in registry.entries]
    assert seams == ["explorer", "advantage", "tracker", "placement", "command"]
    assert Tracked.__doc__


def test_tasks_tools_and_environments() -> None:
    """Samplers, environments of a class, encoders, rows, threads."""
    import asyncio

    from treegraft import Task
    from treegraft.parts import (
        Batcher,
        ClassEnvironments,
        Encoder,
        EnvironmentSettings,
        EnvironmentTool,
        Epochs,
        OpenTasks,
        WorkerPool,
        build_encoder,
        fields,
        interfaces,
        nearest,
        readers,
        run_in_thread,
    )

    task = Task(id="t0", question="2 + 2 ?", reference=("4",))
    assert Epochs([task], seed=0).draw(1, 0, size=1) == [task]
    assert EnvironmentTool.reset_arguments(task)["question"] == "2 + 2 ?"
    encoder: Encoder = build_encoder("hashing")
    vectors = encoder.encode(["two words", "two words and more"])
    ((rows, _),) = nearest.search_exactly(vectors, vectors[1:], [vectors[:, 0] == vectors[:, 0]], 1)
    assert rows.tolist() == [1]
    batcher = Batcher(lambda asked: [2 * one for one in asked], "doubles")
    assert asyncio.run(batcher.ask(2)) == 4
    batcher.close()
    signature = interfaces.Signature.of_schema({"properties": {"n": {"type": "integer"}}})
    assert signature.arguments('{"n": 2}', "add") == {"n": 2}

    class Door:
        """One door."""

        capability = "none"

        def reset(self, **row):
            self.is_open = False

        def open(self) -> str:
            """Opens it."""
            self.is_open = True
            return "open"

    kind = ClassEnvironments(Door, "door", EnvironmentSettings())
    tool = kind.tools[0]
    assert isinstance(tool, EnvironmentTool) and isinstance(tool, interfaces.Tool) and tool.over
    assert EnvironmentTool.tag_of("readFile2") == "read_file_two" and OpenTasks.__doc__

    # Rows of data sets: columns under the names that files give them, and files.
    assert fields.accepted_answers(["4", "four"]) == ("4", "four") and ".csv" in readers.FILE_TYPES

    # A tool that may block runs in a thread of its own, one that may hang in a process of its own.
    assert asyncio.run(run_in_thread(lambda: 2 + 2)) == 4 and WorkerPool.ask.__doc__


def test_recorded_runs_recipes_and_files(tmp_path: Path) -> None:
    """Run folders, recipes, pages, buffers, findings."""
    from pathlib import Path

    from treegraft import load_config, train
    from treegraft.parts import (
        BufferBuild,
        Finding,
        RunReader,
        agents,
        commands,
        files,
        packages,
        recipe,
        setting_rows,
    )

    folder = tmp_path
    tables = recipe.read_based(Path("demo"))
    in_a_smoke_test = tables.pop("smoke")
    tables = recipe.merged(tables, in_a_smoke_test, {"run": {"dir": str(folder)}})
    result = train(tables, display=False)
    run = RunReader(result.run_dir)
    lines, notes = run.clean_metrics()
    file = run.files()[-1]
    drawn = run.drawn(file.name, 0)
    assert lines[-1]["update"] == run.config()["run"]["num_updates"] and not notes
    assert len(drawn["leaves"]) == len(run.tree(file.name, 0).leaves)

    results = files.LineFile(folder / "results.jsonl")  # a crash leaves whole lines
    results.append('{"accuracy": 0.5}')
    assert list(results.lines()) == [(1, '{"accuracy": 0.5}')]

    told = {row.name: row.value for row in setting_rows(load_config(tables)) if not row.is_default}
    assert told["run.dir"] == str(folder)

    builds = recipe.merged(tables, {"buffer": {"build": {"agent": "expert", "num_samples": 2}}})
    build = BufferBuild(load_config(builds), folder / "expert.sqlite")
    assert build.report.num_attempts == 0  # `run` does the work
    assert agents.Attempt(error="no answer").contents == ()
    assert agents.Parts  # what an agent of an extension is made of
    assert packages.lacking("it", "mcp") == "" or "pip install" in packages.lacking("it", "mcp")
    assert commands.Overrides and recipe.flatten({"a": {"b": 1}}) == {"a.b": 1}
    finding = Finding("keys and values", "32 bytes a token")  # for doctor
    assert str(finding) == "keys and values: 32 bytes a token"
