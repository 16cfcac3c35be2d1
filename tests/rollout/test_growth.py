"""Trees that branch and graft: a scripted engine and, per rule, where it happens, what is masked,
what it costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.rollout.test_loop import ANSWER, SEARCH, TASKS, by_step, leave, search
from tests.support.error_codes import raises_code
from tests.support.families import word_tokenizer

from treegraft.core.errors import first_cause
from treegraft.core.interfaces import Explorer, NoiseKey, Request, Retrieved
from treegraft.core.types import (
    Branch,
    BranchCause,
    Completion,
    ContinuationCause,
    Expand,
    GraftCause,
    Observation,
    Origin,
    PathView,
    Start,
    StartCause,
    Status,
    StepContent,
    Task,
    ToolCall,
    Trace,
    Tree,
)
from treegraft.explore.compose import Composed
from treegraft.explore.entropy import EntropyBranching
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.extras.methods.tree_search import TreeSearch, TreeSearchSettings
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.rollout.measure import rollout_metrics, unused_metrics
from treegraft.settings.explore import EntropySettings, GraftSettings
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

OTHERS_STEP = StepContent(calls=(ToolCall("search", "w5"),), observations=(Observation(text="w6"),))
TRACE = Trace(
    key="w0",
    value=OTHERS_STEP,
    reward=0.7,
    source="expert",
    task_id="t/9",
    position=1,
    terminal=False,
)


class OneTrace:
    """Finds the same trace for everybody, or nothing."""

    def __init__(self, trace: Trace | None = TRACE, task_id: str = "") -> None:
        self._trace = trace
        self._task_id = task_id
        self.asked: list[tuple[tuple[StepContent, ...], bool]] = []

    async def retrieve(
        self, task: Task, contents: Sequence[StepContent], *, whole: bool, noise_key: NoiseKey
    ) -> Retrieved | None:
        self.asked.append((tuple(contents), whole))
        await asyncio.sleep(0)
        if self._trace is None:
            return None
        traces = (self._trace,) * (2 if whole else 1)
        return Retrieved(traces=traces, similarity=0.9, task_id=self._task_id)


def make(
    explorer: Explorer,
    replies: Any = by_step,
    *,
    entropy: float | Callable[[str], float] = 0.5,
    retriever: OneTrace | None = None,
    latency_s: Callable[[], float] | None = None,
    engine: Any = None,
    **limits: Any,
) -> Grower:
    tools = [FunctionTool(search)]
    fields = {
        "num_leaves": 4,
        "temperature": 1.0,
        "max_completion_tokens": 60,
        "max_agent_steps": 6,
        "max_tool_calls": 4,
        "deadline_s": 5.0,
    }
    return Grower(
        engine or ScriptedEngine(replies, word_tokenizer(), entropy=entropy, latency_s=latency_s),
        TagsFormat(word_tokenizer(), tools, system_prompt="", require_think=False),
        Toolbox(
            tools,
            ToolsSettings(deadline_s=5.0, max_output_chars=200, cache=False, max_concurrent=8),
        ),
        explorer,
        Limits(**{**fields, **limits}),
        leave,
        retriever=retriever,
    )


def branching(**fields: Any) -> EntropyBranching:
    """ARPO's rule on plain nats, with two starts and a probe of two tokens unless others are
    named."""
    named = {"num_starts": 2, "probe_tokens": 2, "normaliser": "none"} | fields
    return EntropyBranching(EntropySettings(**named), vocab_size=100)


def grow(grower: Grower, task: Task = TASKS[0]) -> Tree:
    trees = asyncio.run(
        grower.grow_all([task], noise_key=(0, "train", 4), group_prefix="4", max_live_trees=1)
    )
    return trees[0]


def unsure_after_results(path: str) -> float:
    """Half a nat at first, one nat after any result."""
    return 1.0 if "<result>" in path else 0.5


def ids(tree: Tree) -> list[str]:
    return [step.id for step in tree.steps]


# ---------------------------------------------------------------------- branching


def test_it_branches_beside_the_continuation_and_shares_the_call() -> None:
    """Two starts search and grow unsure: each gets one more child below its search; 4 leaves, 2
    calls."""
    tree = grow(
        make(
            branching(),
            entropy=unsure_after_results,
        )
    )
    assert ids(tree) == ["0", "0.0", "0.0.0", "0.0.1", "0.1", "0.1.0", "0.1.1"]
    causes = {step.id: step.cause for step in tree.steps}
    assert causes["0.0"] == StartCause() and causes["0.0.0"] == ContinuationCause()
    branched = causes["0.0.1"]
    assert isinstance(branched, BranchCause)
    assert (branched.entropy_change, branched.rule) == (
        pytest.approx(1.0),
        "threshold",
    )  # 2 tokens, half a nat each
    assert branched.probability == pytest.approx(0.7)
    budget = tree.budget
    assert (budget.num_leaves, budget.num_tool_calls) == (4, 2)
    assert budget.num_sampled_tokens == sum(sum(step.sampled_mask) for step in tree.steps)
    assert all(leaf.status is Status.COMPLETED for leaf in tree.leaves)
    metrics = rollout_metrics([tree])
    assert metrics["branch/num_branches"] == 2.0


def test_no_branch_where_entropy_fell_and_fresh_starts_fill_up() -> None:
    tree = grow(
        make(
            branching(),
            entropy=lambda path: 1.5 - unsure_after_results(path),
        )
    )
    assert ids(tree) == ["0", "0.0", "0.0.0", "0.1", "0.1.0", "0.2", "0.2.0", "0.3", "0.3.0"]
    assert tree.budget.num_tool_calls == 4


def test_n_equal_to_m_is_grpo() -> None:
    tree = grow(
        make(
            branching(num_starts=4),
            entropy=unsure_after_results,
        )
    )
    assert not any(isinstance(step.cause, BranchCause) for step in tree.steps)
    assert len(tree.leaves) == 4


def test_finished_rollouts_are_grown_further_round_by_round() -> None:
    """Two starts search and answer; the search is the only step of each that a result follows. Two
    rounds of one child each below both: 6 leaves, and no call but the starts' two."""
    explorer = TreeSearch(TreeSearchSettings(num_starts=2, num_nodes=1))
    tree = grow(make(explorer, num_leaves=6))
    assert ids(tree) == [
        "0",
        "0.0",
        "0.0.0",
        "0.0.1",
        "0.0.2",
        "0.1",
        "0.1.0",
        "0.1.1",
        "0.1.2",
    ]
    assert len(tree.leaves) == 6 and tree.budget.num_tool_calls == 2
    causes = [step.cause for step in tree.steps if step.id in ("0.0.1", "0.1.2")]
    assert [cause.rule for cause in causes if isinstance(cause, BranchCause)] == ["random"] * 2
    metrics = rollout_metrics([tree])
    assert metrics["branch/num_branches"] == 4.0


def test_children_of_a_short_budget_are_shared_between_the_rollouts() -> None:
    """M = 3, N = 2 with two leaves left: one child each below the first two rollouts."""
    explorer = TreeSearch(TreeSearchSettings(num_starts=3, num_nodes=2))
    tree = grow(make(explorer, num_leaves=5))
    assert [one for one in ids(tree) if one.count(".") == 2] == [
        "0.0.0",
        "0.0.1",
        "0.1.0",
        "0.1.1",
        "0.2.0",
    ]


def test_steps_are_drawn_from_all_that_qualify() -> None:
    """Of a rollout with three searches each one gets a child in some of thirty trees."""
    explorer = TreeSearch(TreeSearchSettings(num_starts=1, num_nodes=1))

    def agent(path: str) -> str:
        return SEARCH if path.count("<result>") < 3 else ANSWER

    grower = make(explorer, agent, num_leaves=2)
    tasks = [Task(id=f"t/{n}", question="w0", reference=("w9",)) for n in range(30)]
    trees = asyncio.run(
        grower.grow_all(tasks, noise_key=(0, "train", 4), group_prefix="4", max_live_trees=3)
    )
    depths = {
        step.depth for tree in trees for step in tree.steps if isinstance(step.cause, BranchCause)
    }
    assert depths == {2, 3, 4}


class AtStep(Independent):
    """Asks for a child of one step, whichever it is."""

    expands = True

    def __init__(self, step_id: str) -> None:
        self.step_id = step_id

    def starts(self, max_leaves: int) -> Start:
        return Start(1)

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand]:
        cause = BranchCause(entropy_change=0.0, probability=1.0, rule="own")
        return [Expand(self.step_id, 1, cause)] if len(tree.leaves) < max_leaves else []


@pytest.mark.parametrize("step_id", ["0.0.0", "0.7"])
def test_a_step_that_cannot_be_grown_from_becomes_a_fresh_start(step_id: str) -> None:
    """An answer, and a step that is not there: the group still has its two leaves."""
    assert ids(grow(make(AtStep(step_id), num_leaves=2))) == ["0", "0.0", "0.0.0", "0.1", "0.1.0"]


def test_more_children_than_the_budget_are_cut() -> None:
    """Z = 5 with two leaves left: the first start in the tree gets both."""
    tree = grow(
        make(
            branching(num_branches=5),
            entropy=unsure_after_results,
        )
    )
    assert [step.id for step in tree.steps if isinstance(step.cause, BranchCause)] == [
        "0.0.1",
        "0.0.2",
    ]
    assert len(tree.leaves) == 4
    # The record says why the second start has none: the rule wanted five, the budget was spent.
    decisions = {
        step.id: (step.decision.num_wanted, step.decision.num_opened)
        for step in tree.steps
        if step.decision
    }
    assert decisions == {"0.0.0": (5, 2), "0.1.0": (5, 0)}


def test_a_branch_that_was_not_opened_says_what_the_rule_saw() -> None:
    """Two tokens of half a nat after a result, one nat at the start: the change is -1, P = 0.5 -
    0.2, below the threshold."""
    tree = grow(
        make(
            branching(),
            entropy=lambda path: 1.5 - unsure_after_results(path),
        )
    )
    decisions = {step.id: step.decision for step in tree.steps if step.decision is not None}
    # Fresh starts that fill up are asked too: a budget that is spent must not look like a rule that
    # said no.
    assert sorted(decisions) == ["0.0.0", "0.1.0", "0.2.0", "0.3.0"]
    one = decisions["0.0.0"]
    assert (one.num_wanted, one.num_opened, one.seen.rule, one.seen.bar) == (0, 0, "threshold", 0.5)
    assert one.seen.entropy_change == pytest.approx(-1.0) and one.seen.probability == pytest.approx(
        0.3
    )
    tossed = grow(
        make(
            EntropyBranching(
                EntropySettings(num_starts=2, probe_tokens=2, rule="bernoulli", normaliser="none"),
                vocab_size=100,
            ),
            entropy=unsure_after_results,
        )
    )
    coins = [step.decision.seen for step in tossed.steps if step.decision is not None]
    wanted = [step.decision.num_wanted for step in tossed.steps if step.decision is not None]
    assert all(coin.bar is not None for coin in coins)
    assert wanted == [int(coin.probability > (coin.bar or 0.0)) for coin in coins]


def three_searches(path: str) -> str:
    return ANSWER if path.count("<result>") >= 3 else SEARCH


def test_branches_go_on_and_may_branch_again() -> None:
    """One start, eight leaves, three searches, always unsure: 1 -> 2 -> 4 -> 8 leaves; 1 + 2 + 4
    calls."""
    grower = make(
        branching(num_starts=1, probe_tokens=1),
        three_searches,
        entropy=unsure_after_results,
        num_leaves=8,
    )
    tree = grow(grower)
    assert len(tree.leaves) == 8 and tree.budget.num_tool_calls == 7
    assert sorted(step.depth for step in tree.steps if isinstance(step.cause, BranchCause)) == [
        2,
        3,
        3,
        4,
        4,
        4,
        4,
    ]


def test_only_the_first_child_after_a_result_probes() -> None:
    """A branch's own first tokens never open another branch at the same place."""
    probed: list[str] = []

    class Remembering(EntropyBranching):
        def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
            probed.append(str(path.noise_key[-1]))
            return super().after_probe(path, probe)

    grow(
        make(
            Remembering(EntropySettings(num_starts=1, probe_tokens=1), vocab_size=100),
            three_searches,
            entropy=unsure_after_results,
            num_leaves=8,
        )
    )
    assert (
        all(step_id.endswith(".0") for step_id in probed) and len(probed) == len(set(probed)) == 7
    )


def test_a_step_shorter_than_the_probe_is_probed_at_its_end() -> None:
    grower = make(
        branching(probe_tokens=50),
        entropy=unsure_after_results,
    )
    tree = grow(grower)
    changes = [
        step.cause.entropy_change for step in tree.steps if isinstance(step.cause, BranchCause)
    ]
    first = len(word_tokenizer().encode(SEARCH, add_special_tokens=False))
    assert (
        changes == [pytest.approx(0.5 * first)] * 2
    )  # the common length is that of the shorter step, the search


@pytest.mark.parametrize("method", ["starts", "fill", "restarts", "is_hybrid", "before_step"])
def test_an_explorer_that_raises_is_told_with_its_method_and_task(method: str) -> None:
    """And not as a group of tasks without a cause; also beside another explorer."""

    def fails(*_: object) -> None:
        raise LookupError("no such rule")

    def few(self: Independent, max_leaves: int) -> Start:
        return Start(1)

    kind = type("Mine", (Independent,), {"starts": few, method: fails})
    place = "" if method == "is_hybrid" else f", at task '{TASKS[0].id}'"
    told = f" raised LookupError in {method}{place}: no such rule ({__file__}, line "
    # Steps are asked for where grafts may come. A fault in a rollout is data; here all have it.
    is_data = method == "before_step"
    retriever = OneTrace() if is_data else None
    for explorer, name in (
        (kind(), "'Mine'"),
        (Composed([kind(), Independent()]), "'Mine + Independent'"),
    ):
        with (
            raises_code("all-failed" if is_data else "own-code-raised") as caught,
            first_cause(),
        ):
            tree = grow(make(explorer, retriever=retriever))
            unused_metrics([tree], explorer, 4)
        assert name + told in str(caught.value)
        assert is_data or isinstance(caught.value.__cause__, LookupError)


def test_law_8_a_failed_leaf_does_not_hold_up_the_round() -> None:
    def breaks(path: str) -> str:
        if "<result>" not in path and "w1" in path:
            return SEARCH
        return by_step(path)

    class Lame(ScriptedEngine):
        async def complete(self, request: Request) -> Completion:
            if request.noise_key[-1] == "0.1":
                await asyncio.sleep(3600)
            return await super().complete(request)

    engine = Lame(breaks, word_tokenizer(), entropy=unsure_after_results)
    tree = grow(
        make(
            branching(num_starts=3, probe_tokens=1),
            engine=engine,
            deadline_s=1.5,
        )
    )
    statuses = {leaf.step_id: leaf.status for leaf in tree.leaves}
    assert statuses.pop("0.1") is Status.FAILED
    assert set(statuses.values()) == {Status.COMPLETED} and "0.0.1" in statuses


class Belated(ScriptedEngine):
    """Start 0.1 hangs after its first result, and its probe is posted when its deadline has long
    passed."""

    async def complete(self, request: Request) -> Completion:
        step_id = str(request.noise_key[-1])
        if step_id == "0.1.0":
            assert request.on_probe is not None
            asyncio.get_running_loop().call_later(1.8, request.on_probe, (1.0,))
            await asyncio.sleep(3600)
        if len(step_id.split(".")) == 4:
            await asyncio.sleep(1.2)  # others are still under way when it comes
        return await super().complete(request)


def test_law_8_a_probe_of_a_leaf_that_is_over_changes_nothing() -> None:
    engine = Belated(three_searches, word_tokenizer(), entropy=unsure_after_results)
    explorer = branching(probe_tokens=1)
    fields = {"deadline_s": 1.6, "num_leaves": 7, "max_completion_tokens": 200}
    tree = grow(make(explorer, engine=engine, **fields))
    assert next(leaf.step_id for leaf in tree.leaves if leaf.status is Status.FAILED) == "0.1.0"
    assert "0.1.1" not in ids(tree) and len(tree.leaves) == 7
    assert "0.0.1" in ids(tree)


# ---------------------------------------------------------------------- grafting


def always(**options: Any) -> HybridRollout:
    num_leaves = options.pop("num_leaves", 4)
    settings = GraftSettings(**{"num_hybrid": 2, "probability": 1.0, **options})
    return HybridRollout(settings, num_leaves=num_leaves)


def test_a_graft_follows_an_own_step_and_precedes_one() -> None:
    """Four starts, the last two hybrid with a coin that always says yes: search, graft, answer."""
    retriever = OneTrace()
    tree = grow(make(always(), retriever=retriever))
    assert ids(tree) == [
        "0",
        "0.0",
        "0.0.0",
        "0.1",
        "0.1.0",
        "0.2",
        "0.2.0",
        "0.2.0.0",
        "0.3",
        "0.3.0",
        "0.3.0.0",
    ]
    graft = next(step for step in tree.steps if step.id == "0.2.0")
    assert (
        set(graft.origins) == {Origin.RETRIEVED}
        and not any(graft.loss_mask)
        and not any(graft.sampled_mask)
    )
    assert graft.cause == GraftCause(
        source="expert", task_id="t/9", reward=0.7, similarity=0.9, content_hash=TRACE.content_hash
    )
    text = word_tokenizer().decode(list(graft.token_ids)).split()
    assert text[0] == "<retrieve>" and text[-1] == "</retrieve>" and "w5" in text and "w6" in text
    assert word_tokenizer().decode(list(graft.lesson_ids)).split() == [
        "<search>",
        "w5",
        "</search>",
    ]
    assert graft.content == OTHERS_STEP and graft.stop_reason is None
    assert tree.budget.num_tool_calls == 4  # the graft ran none
    path = tree.trajectories()[2]
    assert path.num_tool_calls == 1 and path.status is Status.COMPLETED
    assert [contents for contents, _ in retriever.asked] == [
        (tree.steps[5].content,),
        (tree.steps[8].content,),
    ]


def test_grafts_never_touch_and_the_next_step_is_sampled_after_them() -> None:
    tree = grow(
        make(always(num_hybrid=4), three_searches, retriever=OneTrace(), max_completion_tokens=200)
    )
    for path in tree.trajectories():
        origins = [step.origin for step in path.steps[1:]]
        assert origins == [Origin.POLICY, Origin.RETRIEVED] * (len(origins) // 2) + [Origin.POLICY]
    # Each path: a search, a graft with its result, a search (three results), a graft, the answer.
    assert tree.budget.num_tool_calls == 4 * 2


def test_nothing_eligible_means_that_the_agent_goes_on() -> None:
    retriever = OneTrace(None)
    tree = grow(make(always(num_hybrid=4), retriever=retriever))
    assert len(retriever.asked) == 4 and not any(
        step.origin is Origin.RETRIEVED for step in tree.steps
    )
    assert rollout_metrics([tree])["rollout/retrieved_frac"] == 0.0


def test_a_graft_that_leaves_no_room_is_not_attached() -> None:
    """A search takes 3 + 4 tokens; the graft 9 more; an answer needs room too."""
    grower = make(always(num_hybrid=4), retriever=OneTrace(), max_completion_tokens=14)
    tree = grow(grower)
    assert grower.num_grafts_without_room == 4
    assert not any(step.origin is Origin.RETRIEVED for step in tree.steps)
    assert all(leaf.status is Status.COMPLETED for leaf in tree.leaves)


def test_a_long_graft_is_cut_from_the_left_and_counted() -> None:
    """After the search 7 of 60 tokens are used; a graft of over 53 is cut to 26: the end of its
    result survives."""
    long = StepContent(
        calls=(ToolCall("search", "w5"),),
        observations=(Observation(text=" ".join(f"w{n % 9}" for n in range(70)) + " w8"),),
    )
    trace = Trace("w0", long, 1.0, "expert", "t/9", 1, False)
    tree = grow(make(always(num_hybrid=4), retriever=OneTrace(trace)))
    grafts = [step for step in tree.steps if step.origin is Origin.RETRIEVED]
    assert len(grafts) == 4 and all(len(step.token_ids) == 26 for step in grafts)
    words = word_tokenizer().decode(list(grafts[0].token_ids)).split()
    assert words[0] == "<retrieve>" and words[-3:] == ["w8", "</result>", "</retrieve>"]
    assert isinstance(grafts[0].cause, GraftCause) and grafts[0].cause.num_cut > 0
    assert grafts[0].lesson_ids == ()  # a lesson would teach what nobody was shown
    assert all(leaf.status is Status.COMPLETED for leaf in tree.leaves)


def test_grafts_do_not_count_as_agent_steps_or_calls() -> None:
    tree = grow(
        make(always(num_hybrid=4), retriever=OneTrace(), max_agent_steps=2, max_tool_calls=1)
    )
    assert all(leaf.status is Status.COMPLETED for leaf in tree.leaves)


def test_a_whole_trajectory_is_one_graft() -> None:
    retriever = OneTrace()
    tree = grow(
        make(
            always(num_hybrid=4, unit="trajectory"),
            three_searches,
            retriever=retriever,
            max_completion_tokens=200,
        )
    )
    assert all(whole for _, whole in retriever.asked) and len(retriever.asked) == 4
    grafts = [step for step in tree.steps if step.origin is Origin.RETRIEVED]
    assert len(grafts) == 4
    words = word_tokenizer().decode(list(grafts[0].token_ids)).split()
    assert words.count("<retrieve>") == 1 and words.count("w5") == 2
    assert grafts[0].lesson_ids == ()


def test_metrics_of_grafts_by_hand() -> None:
    own = make(always(), retriever=OneTrace(task_id=TASKS[0].id))
    assert rollout_metrics([grow(own)])["graft/same_task_frac"] == 1.0
    tree = grow(make(always(), retriever=OneTrace()))
    metrics = rollout_metrics([tree])
    assert (metrics["graft/num_grafts"], metrics["graft/hybrid_frac"]) == (2.0, 0.5)
    assert (metrics["graft/same_task_frac"], metrics["graft/similarity_mean"]) == (
        0.0,
        pytest.approx(0.9),
    )
    assert metrics["graft/source_reward_mean"] == pytest.approx(0.7)
    graft = next(step for step in tree.steps if step.origin is Origin.RETRIEVED)
    total = sum(len(step.token_ids) for step in tree.steps[1:])
    assert metrics["rollout/retrieved_frac"] == pytest.approx(2 * len(graft.token_ids) / total)


# ---------------------------------------------------------------------- both


def both(**options: Any) -> Composed:
    return Composed(
        [
            EntropyBranching(
                EntropySettings(num_starts=2, probe_tokens=1, **options, normaliser="none"),
                vocab_size=100,
            ),
            HybridRollout(GraftSettings(num_hybrid=8), num_leaves=8),
        ]
    )


def test_no_branch_opens_right_after_a_graft() -> None:
    """Every rule would branch: entropy always rises. It is asked after results alone, since
    entropy after a graft says something about the graft."""
    num_asked = 0
    for number in range(4):
        grower = make(
            both(base_prob=1.0, threshold=0.0),
            three_searches,
            retriever=OneTrace(),
            max_completion_tokens=200,
            num_leaves=8,
        )
        tree = grow(grower, Task(id=f"t/{number}", question="w0", reference=("w9",)))
        by_id = {step.id: step for step in tree.steps}
        assert any(isinstance(step.cause, GraftCause) for step in tree.steps)
        for step in tree.steps:
            above = by_id.get(step.parent or "")
            if step.decision is not None or isinstance(step.cause, BranchCause):
                num_asked += 1
                assert above is not None and above.origin is Origin.POLICY
    assert num_asked > 0


def test_a_branch_shares_the_grafts_above_it() -> None:
    """A hybrid path that took a graft searches on and grows unsure: its children share the
    graft."""
    composed = Composed(
        [
            branching(probe_tokens=1),
            HybridRollout(GraftSettings(num_hybrid=8, probability=0.5), num_leaves=8, num_starts=2),
        ]
    )
    shared = 0
    for number in range(6):
        grower = make(
            composed,
            three_searches,
            retriever=OneTrace(),
            entropy=unsure_after_results,
            max_completion_tokens=200,
            num_leaves=8,
        )
        tree = grow(grower, Task(id=f"t/{number}", question="w0", reference=("w9",)))
        by_id = {step.id: step for step in tree.steps}
        assert len(tree.leaves) == 8
        for step in tree.steps:
            if isinstance(step.cause, BranchCause):
                assert (
                    step.origin is Origin.POLICY
                    and by_id[step.parent or ""].origin is Origin.POLICY
                )
                shared += any(
                    by_id[step.id[:n]].origin is Origin.RETRIEVED
                    for n in range(1, len(step.id))
                    if step.id[:n] in by_id
                )
    assert shared >= 3


def wander(path: str) -> str:
    """Searches up to three times, a number of times that the path decides."""
    results = path.count("<result>")
    return ANSWER if (results and (len(path) + results) % 3 == 0) or results >= 4 else SEARCH


def mood(path: str) -> float:
    return 0.3 + (len(path) * 7919 % 13) / 13


@pytest.mark.parametrize("rule", ["threshold", "bernoulli"])
def test_law_12_shuffled_latencies_give_the_same_trees(rule: str) -> None:
    found = []
    for seed in range(4):
        luck = random.Random(seed)
        grower = make(
            both(rule=rule),
            wander,
            entropy=mood,
            retriever=OneTrace(),
            latency_s=lambda luck=luck: luck.random() * 0.01,  # type: ignore[misc]
            num_leaves=8,
            max_completion_tokens=200,
        )
        found.append([grow(grower, task) for task in TASKS])
    assert found[0] == found[1] == found[2] == found[3]
    steps = [step for tree in found[0] for step in tree.steps]
    assert any(isinstance(step.cause, BranchCause) for step in steps)
    assert any(isinstance(step.cause, GraftCause) for step in steps)
    assert all(len(tree.leaves) == 8 for tree in found[0])


def test_law_5_paths_with_branches_and_grafts_are_what_the_engine_was_given_and_gave() -> None:
    engine = ScriptedEngine(wander, word_tokenizer(), entropy=mood)
    tree = grow(
        make(both(), engine=engine, retriever=OneTrace(), num_leaves=8, max_completion_tokens=200)
    )
    given = {str(call.noise_key[-1]): call.prefix_ids for call in engine.calls}
    for path in tree.trajectories():
        before: list[int] = []
        for step in path.steps:
            if step.origin is Origin.POLICY:
                assert list(given[step.id]) == before
            before += step.token_ids.tolist()
