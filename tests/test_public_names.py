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
    registry.explorer("mine", ExplorerKind(title="Mine", branches=True))
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


def test_loops() -> None:
    """Trees, a learner, rows, losses, and an engine over tokens of a server."""
    import torch

    from treegraft import Session, load_config
    from treegraft.parts import (
        LeafRow,
        Learner,
        NoDisplay,
        Sampling,
        interfaces,
        leaf_rows,
        losses,
        objectives,
        served,
    )

    config = load_config("demo", ["num_leaves=4", "max_completion_tokens=24"])
    with Session(config) as session:
        assert isinstance(session.learner, Learner)
        trees = session.credit(session.sample(1, session.tasks[:2]))  # scored, with advantages
        # An engine over somebody else's servers: a `Draft` says where a completion ends.
        request = interfaces.Request((3, 4), Sampling(max_new_tokens=8), noise_key=("t",))
        stops, kind = served.StopFinder(session.tokenizer), served.EntropyKind.TOP_K
        begun = served.Draft(stops, frozenset({0}), request, 8, kind)
        begun.take(served.TokenReply([5, 0], [-0.1, -0.3], [0.2, 0.1]))
        assert begun.finish == "end" and begun.completion(0).token_ids == (5, 0)
    row: LeafRow = leaf_rows(trees, config)[0]
    assert len(row.advantages) == len(row.completion_ids) and row.weight == 1 / 4

    logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, -0.5])  # [C] each
    clipped = losses.clipped_surrogate(
        logprobs,
        logprobs,
        advantages,
        clip_low=0.2,
        clip_high=0.2,
        shaping=torch.tensor([1.5, 1.0]),
    )
    # Of the first the ratio is 1.5 by its shaping, and cut at 1.2.
    torch.testing.assert_close(clipped.losses, torch.tensor([-0.6, 0.5]))
    capped = objectives.capped_surrogate(
        logprobs, logprobs, advantages, clip_low=0.2, clip_high=0.2
    )
    torch.testing.assert_close(capped.losses, -advantages * logprobs)  # CISPO at ratio 1
    NoDisplay().note("shows nothing")


def test_recorded_runs_recipes_and_files(tmp_path: Path) -> None:
    """Run folders, recipes, pages, buffers, findings."""
    from pathlib import Path

    from treegraft import load_config, train
    from treegraft.parts import (
        BufferBuild,
        Finding,
        RunReader,
        Trained,
        agents,
        commands,
        files,
        judging,
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
    last = Trained.of(result.run_dir)  # its latest checkpoint, with the settings of its run
    assert last.state.update == 1 and last.config.run.num_updates == 1 and last.method
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
    assert judging.TraceFile and judging.Parts  # of work on stored trajectories
    assert packages.lacking("it", "mcp") == "" or "pip install" in packages.lacking("it", "mcp")
    assert commands.Overrides and recipe.flatten({"a": {"b": 1}}) == {"a.b": 1}
    finding = Finding("keys and values", "32 bytes a token")  # for doctor
    assert str(finding) == "keys and values: 32 bytes a token"


def test_training(tmp_path: Path) -> None:
    """Training, reading a run, evaluating, asking."""
    from treegraft import (
        Config,
        RunResult,
        __version__,
        answer_question,
        evaluate_checkpoint,
        load_config,
        read_trees,
        sft,
        train,
        trust,
    )

    small = {
        "run": {"num_updates": 1, "tasks_per_update": 2, "dir": str(tmp_path)},
        "explore": {"num_leaves": 4},
        "tasks": {"num_eval": 4},
        "rollout": {"max_completion_tokens": 16},
    }
    config: Config = load_config(small, ["run.seed=1"])
    result: RunResult = train(config, display=False)
    assert result.history[-1]["update"] == 1 and len(read_trees(result.run_dir)) == 2
    assert RunResult.read(result.run_dir).checkpoint_dir == result.checkpoint_dir
    trust(result.run_dir)  # of a folder from elsewhere: what its settings name may run from now on
    measured = evaluate_checkpoint(result.checkpoint_dir, display=False)
    assert measured.num_tasks == 4 and measured.metrics["eval/accuracy"] <= 1
    trajectory, tokenizer = answer_question(result.checkpoint_dir, "r2 of e9 ?")
    assert tokenizer.decode(list(trajectory.token_ids))

    warmed = sft({**small, "warmup": {"num_steps": 2}}, display=False)  # the same, without updates
    assert warmed.checkpoint_dir.is_dir() and __version__


def test_data() -> None:
    """A tree made by hand."""
    from treegraft import Origin, Status, Step, StepContent, Task, Trajectory, Tree
    from treegraft.parts import Leaf

    task = Task(id="t0", question="2 + 2 ?", reference=("4",))
    prompt = Step(
        id="0",
        parent=None,
        depth=0,
        token_ids=(3, 4),
        origins=(Origin.PROMPT,) * 2,
        loss_mask=(False,) * 2,
        sampling_logprobs=(0.0,) * 2,
        entropies=(0.0,) * 2,
    )
    answer = Step(
        id="0.0",
        parent="0",
        depth=1,
        token_ids=(5,),
        origins=(Origin.POLICY,),
        loss_mask=(True,),
        sampling_logprobs=(-0.5,),
        entropies=(0.7,),
        content=StepContent(answer="4"),
    )
    leaf = Leaf(step_id="0.0", status=Status.COMPLETED, reward=1.0, answer="4")
    tree = Tree(task=task, group_id="1/t0", steps=(prompt, answer), leaves=(leaf,))
    (trajectory,) = tree.trajectories()
    assert isinstance(trajectory, Trajectory) and trajectory.token_ids == [3, 4, 5]
    assert trajectory.loss_mask == [False, False, True] and trajectory.reward == 1.0


def test_mathematics() -> None:
    """Advantages and rewards, by arithmetic."""
    from treegraft import (
        branch_probability,
        combined_advantages,
        entropy_change,
        group_advantages,
        retrieval_reward,
        shaping_factor,
        shared_advantages,
    )

    # Of rewards 1, 0: the mean is 0.5, the sample standard deviation 0.707.
    assert group_advantages([1.0, 0.0]).round(3).tolist() == [0.707, -0.707]
    # The mean over the leaves below each step: of both, and of the first alone.
    assert shared_advantages([1.0, -0.5], [[0, 1], [0]]).tolist() == [0.25, 1.0]
    change = entropy_change([1.0, 2.0], [0.5, 0.5], normaliser=10.0)  # (0.5 + 1.5) / 10
    assert change == 0.2 and abs(branch_probability(change) - 0.54) < 1e-12  # 0.5 + 0.2 * 0.2
    assert retrieval_reward(1.0, 1.0) == 0.0 and retrieval_reward(1.0, 0.5) > 0  # entropy fell
    assert combined_advantages([1.0, -1.0], [0.0, 0.0]).tolist() == [1.0, -1.0]  # no graft
    assert shaping_factor(0.5) == 1.025  # 1 + 0.05 * 0.5


def test_packed_trees() -> None:
    """Scores of unique tokens, and of each trajectory."""
    from treegraft import Session, TreeBatch, pack_trees, token_scores

    settings = {"explore": {"num_leaves": 4}, "rollout": {"max_completion_tokens": 16}}
    with Session(settings) as session:
        trees = session.credit(session.sample(1, session.tasks[:2]))
        batch: TreeBatch = pack_trees(trees)
        logprobs, entropies = token_scores(session.learner.model, batch)  # [unique tokens]
    paths = [path for tree in trees for path in tree.trajectories()]
    first = batch.per_trajectory(logprobs)[0]  # [sampled tokens of the first trajectory]
    assert len(first) == sum(paths[0].sampled_mask) and len(entropies) == len(logprobs)


def test_answers() -> None:
    """Comparisons of answers."""
    from treegraft import exact_match, f1, math_equal

    assert exact_match("The  Eiffel Tower", ["eiffel tower"]) == 1.0
    assert f1("new york", "new york city") == 0.8  # precision 1, recall 2/3
    assert math_equal("\\frac{1}{2}", "0.5") and not math_equal("2", "3")
