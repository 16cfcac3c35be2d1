"""The data that travels between modules: frozen, one file, each field with its shape and unit.

A tree with two trajectories, `p` prompt, `s` sampled and `t` tool tokens:

    0        p p p p                       the root: the prompt
    ├─ 0.0   s s s | t t                   a search and its result
    │  └─ 0.0.0   s s                      an answer: leaf 0, path p p p p s s s t t s s
    └─ 0.1   s s s s                       an answer at once: leaf 1

A step's id is the path of child ordinals from the root, so it depends on where the step is and
never on when it arrived. Ids follow time: a step comes after the one whose id its own begins with.
Where an agent's context is written anew, as by templates that drop earlier thoughts, the step
before is not the step that the tokens continue, which `Step.parent` names:

    0              p p p p
    └─ 0.0         s s s s s             a thought and a call; parent 0
       └─ 0.0.0    c c t t               the call without its thought, and its result; parent 0
          └─ 0.0.0.0   s s              an answer, which saw p p p p c c t t; parent 0.0.0
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal

from treegraft.core.columns import Column, is_same, pack_columns, written_by
from treegraft.core.columns import Origin as Origin
from treegraft.core.shown import ShownStep, ShownTrajectory, ShownTree

ROOT_ID = "0"
SYSTEM_ROLES = frozenset({"system", "developer"})
"""Roles of the first message that say how to answer and ask nothing."""


def ids_to(step_id: str) -> Iterator[str]:
    """Yields the ids on the path to a step: "0", "0.2", "0.2.0"."""
    return itertools.accumulate(step_id.split("."), "{}.{}".format)


RetrievalVariant = Literal[
    "paper",
    "inverted_entropy",
    "inverted_timing",
    "inverted_both",
    "no_quality",
    "no_timing",
    "none",
]
"""RAPO's retrieval reward, its ablations, and no retrieval reward at all."""


class Status(StrEnum):
    """The end of a trajectory."""

    COMPLETED = "completed"
    """An answer in the expected format."""
    TRUNCATED = "truncated"
    """Out of tokens, agent steps or tool calls before an answer."""
    FORMAT_VIOLATION = "format_violation"
    """The agent broke a rule of the format."""
    FAILED = "failed"
    """Our fault: engine, tool service or deadline. No reward, out of the group."""

    @property
    def rule(self) -> LearningRule:
        """The status's effect on learning."""
        return LEARNING_RULES[self]


class StopReason(StrEnum):
    """Why the sampling of a step ended."""

    STOP = "stop"
    """A stop string: the end of a tool call, or text after a final answer."""
    END = "end"
    """An end-of-sequence token."""
    LENGTH = "length"
    """The trajectory's token limit."""
    AGENT_STEPS = "agent_steps"
    """The trajectory's step limit, reached with this step."""
    TOOL_CALLS = "tool_calls"
    """A call beyond the trajectory's tool-call limit; it was not run."""
    ERROR = "error"
    """A failure of ours."""


class EntropyKind(StrEnum):
    """The kind of numbers that `entropies` hold."""

    EXACT = "exact"
    """Over the full vocabulary, of softmax(logits / T)."""
    TOP_K = "top_k"
    """Over the k most likely tokens only: a lower bound."""
    SAMPLED = "sampled"
    """-ln p of the sampled token alone: an estimate with the variance of one draw."""


@dataclass(frozen=True, slots=True)
class LearningRule:
    """The effect of a leaf's status on learning (one row of the status table)."""

    in_group: bool
    """Counts in the group's mean and standard deviation."""
    in_denominator: bool
    """Its tokens count in the loss's denominators."""
    has_loss: bool
    """Its sampled tokens carry loss."""


# Truncations and violations stay in the group, as in the papers: the agent caused them, and without
# them it would be compared with its successes only. A fault of ours says nothing about the agent.
LEARNING_RULES: Mapping[Status, LearningRule] = {
    Status.COMPLETED: LearningRule(True, True, True),
    Status.TRUNCATED: LearningRule(True, True, True),
    Status.FORMAT_VIOLATION: LearningRule(True, True, True),
    Status.FAILED: LearningRule(False, False, False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One question with its reference.

    Task(id="search_world/train/17", question="r2 of r5 of e9 ?", reference=("e41",), category="2
    hops")
    """

    id: str
    """Unique within its data set."""
    question: str
    """The agent's question."""
    reference: tuple[str, ...]
    """Accepted answers; the best match counts. Empty: nothing to compare with."""
    category: str = ""
    """The category by which evaluation breaks its results down, e.g. "3 hops"; empty for none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row of the data set, handed to reward functions and environments by name."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The conversation that ends with the question, as {"role", "content"} messages whose contents
    are texts; empty if the question is all."""

    def conversation(self, system_prompt: str = "") -> list[dict[str, Any]]:
        """Returns the messages that ask the question: the task's own, or the question as a user's.

        Args:
            system_prompt: of the recipe; it follows the system prompt that the task's messages
                begin with, if any. "" adds none.
        """
        given = self.messages or ({"role": "user", "content": self.question},)
        # Copies: the task is shared by all of its trees.
        messages = [dict(one) for one in given]
        if messages[0]["role"] in SYSTEM_ROLES and system_prompt:
            messages[0]["content"] = f"{messages[0]['content']}\n\n{system_prompt}"
        elif system_prompt:
            messages.insert(0, {"role": "system", "content": system_prompt})
        return messages

    def asking(self, question: str) -> Task:
        """Returns the same task with other words in its question, in its messages too."""
        messages = [dict(one) for one in self.messages]
        for message in reversed(messages):
            if message["role"] == "user":
                message["content"] = question
                break
        return replace(self, question=question, messages=tuple(messages))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, such as ToolCall(name="python", body="print(6 * 7)")."""

    name: str
    """The tool's name."""
    body: str
    """The tool's input: a text, or a JSON object for several arguments."""
    problem: str | None = field(default=None, repr=False)
    """The fault in its arguments, in words for the agent; such a call is not run. None where
    the tool is to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the agent reads after a call, such as Observation(text="42") or
    Observation(text="ZeroDivisionError: division by zero", is_error=True)."""

    text: str
    """The text that the agent reads, after the output cap."""
    is_error: bool = False
    """The call failed through the agent's own fault; an observation like any other."""
    is_truncated: bool = False
    """The output cap cut it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContent:
    """The content of a step, free of any markup, so that every format can render it.

    StepContent(thought="12 * 7 needs a tool", calls=(ToolCall("python", "print(12*7)"),),
                observations=(Observation(text="84"),))
    """

    thought: str = ""
    calls: tuple[ToolCall, ...] = ()
    observations: tuple[Observation, ...] = ()
    """One for each call; empty before the calls have run."""
    answer: str | None = None
    """The final answer; None while the agent goes on."""


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """ParsedStep(StepContent(thought="look it up", calls=(ToolCall("search", "r1 of e2"),)),
    violation=None)"""

    content: StepContent
    """The step's content; after a violation no more than its thought."""
    violation: str | None
    """Which rule the step broke; None where it broke none."""

    @property
    def is_complete(self) -> bool:
        """Whether the step has a whole call or answer; False for one that ran out of tokens, or
        broke a rule."""
        return bool(self.content.calls) or self.content.answer is not None


@dataclass(frozen=True, slots=True)
class Trace:
    """One step of an off-policy agent, stored under the text before it.

    Trace(key="r5 of r2 of e9 ?\nsearch e9 r2\nr2 of e9 is e41",
          value=StepContent(calls=(ToolCall("search", "e41 r5"),), ...), reward=1.0,
          source="expert", task_id="search_world/train/17", position=1, terminal=False)
    """

    key: str
    """The question and the steps before, as text; the latest step is last."""
    value: str | StepContent
    """The step with its results; a text where nothing is known of its parts."""
    reward: float
    """The reward of its trajectory."""
    source: str
    """Which agent wrote it."""
    task_id: str
    """The task it was written on; empty where unknown."""
    position: int
    """Steps before it."""
    terminal: bool
    """It contains the final answer."""
    trajectory: str = ""
    """Which trajectory of that source and task it is from; traces that share it follow each other
    by `position`."""
    policy_version: int | None = None
    """Of the policy being trained, where that wrote it; None for other agents."""
    question: str = ""
    """Of a first step: the question with its white space, where the key has other; else empty."""

    @property
    def content_hash(self) -> str:
        """Checksum of key, value, source and task: two traces with the same are one."""
        value = self.value if isinstance(self.value, str) else _repr_for_hash(self.value)
        parts = (self.key, type(self.value).__name__, value, self.source, self.task_id)
        return hashlib.sha256("\x1f".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _repr_for_hash(content: StepContent) -> str:
    # Observations of 0.6 had one more field, whose value never changed; buffers made then hold
    # hashes with it and have to recognise their traces.
    seen = [f"{repr(observation)[:-1]}, is_cached=False)" for observation in content.observations]
    as_tuple = f"({seen[0]},)" if len(seen) == 1 else f"({', '.join(seen)})"
    before = f"thought={content.thought!r}, calls={content.calls!r}"
    return f"StepContent({before}, observations={as_tuple}, answer={content.answer!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Which tokens may be drawn, and how those of the path are penalised. The defaults leave the
    policy's distribution as it is; `policy.engine.filters` has the definitions and their order."""

    top_k: int = 0
    """The so many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """The fewest tokens with at least this probability together, 0..1."""
    repetition_penalty: float = 1.0
    """Divides positive logits of the path's tokens, and multiplies negative ones."""


NO_FILTERS = Filters()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a completion is sampled. Sampling(max_new_tokens=64, stop=("</search>",),
    final=("</answer>",))"""

    max_new_tokens: int
    """Limit of this request, in tokens; at least 1."""
    temperature: float = 1.0
    """0 is greedy, with log-probabilities and entropies of temperature 1."""
    filters: Filters = NO_FILTERS
    """With other than the default, log-probabilities and entropies are of what remains."""
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the token that closes one stays whole."""
    final: tuple[str, ...] = ()
    """Texts after which exactly one more token is sampled, meant for the end-of-sequence token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One completion of an engine. All tuples have one entry per sampled token."""

    token_ids: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    """Natural logarithms, of softmax(logits / T)."""
    entropies: tuple[float, ...]
    """Nats, of softmax(logits / T)."""
    entropy_kind: EntropyKind = EntropyKind.EXACT
    finish: StopReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class StartCause:
    """The first step of a first-level rollout."""


@dataclass(frozen=True, slots=True)
class ContinuationCause:
    """The ordinary next step of its parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchCause:
    """A further sampled child of its parent."""

    entropy_change: float
    """The entropy change that the rule saw, in its own normalisation."""
    probability: float
    """The probability with which the rule branched, 0..1."""
    rule: str
    """The rule's name."""
    bar: float | None = None
    """The bar that the probability had to exceed: the threshold, or the coin that was tossed; None
    where not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchDecision:
    """The numbers that a rule saw in a step's first tokens, and how many branches were opened
    beside that step.

    BranchDecision(seen=BranchCause(entropy_change=-0.2, probability=0.46, rule="threshold",
    bar=0.5), num_wanted=0, num_opened=0)
    """

    seen: BranchCause
    num_wanted: int
    """Branches that the explorer wanted; 0 where the rule said no."""
    num_opened: int = 0
    """How many of them there was budget for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraftCause:
    """A step retrieved from another agent."""

    source: str
    """The other agent."""
    task_id: str
    """The task on which it wrote the step."""
    reward: float
    """The reward of its trajectory there."""
    similarity: float
    """Cosine between the retrieval key and the trace's key, -1..1; 0 where the trace was drawn at
    random."""
    content_hash: str = ""
    """Which trace of the buffer."""
    num_cut: int = 0
    """Tokens cut from its left for want of room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCause:
    """A step of a stored trajectory of the same task. It is the history of the rollouts that begin
    below it, and counts in no loss, length or entropy."""

    source: str
    """The agent that wrote it."""
    reward: float
    """Of its trajectory, when it was stored."""
    content_hash: str = ""
    """Which trace of the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartCause:
    """The first sampled step of a rollout that begins below steps which it did not sample."""

    rule: str
    """The rule's name."""
    num_steps: int
    """Steps above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryCause:
    """The first step of a rollout that a `Retry` opened. It begins with forced tokens, a thought
    and the opening of a tool call or an answer; the policy samples the rest."""

    rule: str
    """The rule's name."""
    beside: str
    """The finished step whose thought stays, by its id; retries of one step share it."""


@dataclass(frozen=True, slots=True)
class ContextCause:
    """A context that was written anew, after the step before it and for those below it."""


_Sampled = StartCause | ContinuationCause | BranchCause | RestartCause | RetryCause
Cause = _Sampled | GraftCause | StoredCause | ContextCause
_ORIGINS = tuple(Origin)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class Step(ShownStep):
    """One thought, action and observation; the root is the prompt.

    Its columns are read-only numpy arrays; a sequence of numbers that a step is made of becomes
    one. `dataclasses.replace` makes a changed copy, which shares the other columns.

    Step(id="0.0", parent="0", depth=1, token_ids=(7, 8, 3, 9),
         origins=(POLICY, POLICY, POLICY, TOOL), loss_mask=(True, True, True, False),
         sampling_logprobs=(-0.1, -1.2, -0.3, 0.0), entropies=(0.4, 1.9, 0.8, 0.0), ...)
    """

    id: str
    """Path of child ordinals from the root, "0.2.0"; the root is "0"."""
    parent: str | None
    """The step whose context its tokens continue: the one before it, or an earlier one of its path
    if its context was written anew; None for the root and for a context that shares nothing with an
    earlier one."""
    depth: int
    """Steps above it on its path; 0 for the root."""
    token_ids: Column
    """[tokens] int32, or int64 if one needs it. Of this step only; a path's tokens are the
    concatenation."""
    origins: Column
    """[tokens] int8: who wrote each; compared with an `Origin` by ==, never by `is`."""
    loss_mask: Column
    """[tokens] bool, a decision: True needs origin POLICY."""
    sampling_logprobs: Column
    """[tokens] float32, or float64 if one needs it, as all scores. Of the engine when it sampled;
    0.0 where the token was not sampled."""
    entropies: Column
    """[tokens] nats, of the distribution the token was drawn from; 0.0 where it was not sampled."""
    entropy_kind: EntropyKind = EntropyKind.EXACT
    temperature: float = 1.0
    """Of its sampled tokens; scores are of softmax(logits / temperature), at 0 of temperature 1. In
    evaluations with top-k and the like, of the tokens that these leave."""
    content: StepContent = StepContent()
    """The step's content; for the root its thought is the question."""
    stop_reason: StopReason | None = None
    """None for the root and for steps that were not sampled."""
    violation: str | None = None
    """Which rule of the format the step broke; None where it broke none."""
    policy_version: int = 0
    """Version of the policy that sampled it."""
    cause: Cause | None = None
    """Why it is here; None for the root."""
    decision: BranchDecision | None = None
    """Why branches were opened beside it or were not; None where no rule decided: a first step, a
    branch's own first step, a step after a graft, an explorer that does not branch."""
    lesson_ids: tuple[int, ...] = ()
    """For a graft: its agent's own text, as the policy would have written it here; for a retry that
    teaches, its forced opening. Read by learning from grafts alone."""
    advantage: float | None = None
    """The advantage of its tokens on every trajectory (hard attribution); None: on each trajectory
    that one's own."""
    credit_factors: Column | None = None
    """[tokens] factors of the advantage, token by token, on every trajectory (AEPO); 1.0 where not
    sampled; None: 1 everywhere."""
    old_logprobs: Column | None = None
    """[tokens] of the learner before learning, 0.0 where not sampled; None before learning or when
    not learned from."""
    ratios: Column | None = None
    """[tokens] new / old probability in the last optimiser step that saw it, 1.0 where not sampled;
    None as above."""

    def __post_init__(self) -> None:
        pack_columns(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Step):
            return NotImplemented
        names = (one.name for one in fields(self))
        return all(is_same(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        return hash((self.id, self.parent, self.token_ids.tobytes()))

    @property
    def before(self) -> str | None:
        """The step before it in time; None for the root."""
        return self.id.rpartition(".")[0] or None

    @property
    def is_context(self) -> bool:
        """Whether it holds earlier steps, written anew, and none of its own."""
        return isinstance(self.cause, ContextCause)

    @property
    def num_tokens(self) -> int:
        """Tokens of this step."""
        return len(self.token_ids)

    @property
    def sampled_mask(self) -> Column:
        """[tokens] True where the policy sampled the token."""
        return written_by(self.origins, Origin.POLICY)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return self.num_by(Origin.POLICY)

    def num_by(self, origin: Origin) -> int:
        """Returns the number of tokens that one author wrote."""
        return int(written_by(self.origins, origin).sum())

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that carry loss."""
        return int(self.loss_mask.sum())

    @property
    def sampled_entropies(self) -> list[float]:
        """The entropies of the tokens that the policy sampled, in nats."""
        entropies: list[float] = self.entropies[self.sampled_mask].tolist()
        return entropies

    @property
    def origin(self) -> Origin:
        """Who wrote the step: that of its first token behind a forced opening (a policy step also
        has its tools' results)."""
        written = self.origins[~written_by(self.origins, Origin.FORCED)]
        return Origin(written[0]) if written.size else Origin.FORCED

    @property
    def written_ids(self) -> tuple[int, ...]:
        """[tokens] those that the policy sampled, with the forced opening before them."""
        is_written = self.sampled_mask | written_by(self.origins, Origin.FORCED)
        return tuple(self.token_ids[is_written].tolist())

    def advantage_below(self, leaf: Leaf) -> float:
        """Returns the advantage of its tokens on the trajectory that ends in `leaf`, without
        `credit_factors`; 0 before credit."""
        return (leaf.advantage or 0.0) if self.advantage is None else self.advantage

    @property
    def is_graft(self) -> bool:
        """Whether it was retrieved for this path; False for a stored step that rollouts begin
        below."""
        return self.origin is Origin.RETRIEVED and not isinstance(self.cause, StoredCause)

    @property
    def ordinals(self) -> tuple[int, ...]:
        """The id as numbers; sorting by it is depth-first order."""
        return tuple(int(part) for part in self.id.split("."))


@dataclass(frozen=True, slots=True)
class PathView:
    """An unfinished path, from the root to its last finished step."""

    steps: tuple[Step, ...]
    """The root first."""
    noise_key: tuple[int | str, ...]
    """Of the step that comes next; keyed randomness is a function of it."""

    @property
    def start(self) -> int:
        """Ordinal of the first-level rollout that the path belongs to; branches inherit it."""
        return self.steps[1].ordinals[1]

    @property
    def num_sampled(self) -> int:
        """Steps that the policy sampled."""
        return sum(step.origin is Origin.POLICY for step in self.steps)

    @property
    def num_grafts(self) -> int:
        """Number of retrieved steps."""
        return sum(step.is_graft for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored trajectory of the task, as an explorer sees it. Stored(num_steps=4, has_answer=True,
    reward=1.0, source="expert")"""

    num_steps: int
    """Steps that a rollout can begin below: those before the answer that leave it room."""
    has_answer: bool
    """Whether it can be in the tree whole, as a leaf."""
    reward: float
    """When it was stored."""
    source: str
    """The agent that wrote it."""


@dataclass(frozen=True, slots=True)
class Below:
    """The place below the first steps of a stored trajectory."""

    stored: int
    """Its number among those of the task."""
    num_steps: int | None
    """Steps, at least 1; None for all with the answer: the stored trajectory is then a leaf, and
    nothing is sampled."""
    rule: str = ""
    """The name of the rule that chose it."""


@dataclass(frozen=True, slots=True)
class Start:
    """Opens rollouts at the prompt, or below stored steps."""

    num: int
    below: Below | None = None
    """None for the prompt."""


@dataclass(frozen=True, slots=True)
class Generate:
    """The policy samples the next step."""


@dataclass(frozen=True, slots=True)
class Graft:
    """A step of another agent is retrieved and attached; the policy samples the one after it."""

    whole: bool = False
    """The rest of the other agent's trajectory instead of one step."""


@dataclass(frozen=True, slots=True)
class Branch:
    """Opens further sampled children below a step."""

    num: int
    """0: the rule looked and said no, which is worth recording."""
    cause: BranchCause


@dataclass(frozen=True, slots=True)
class Expand:
    """Opens further sampled children below a step of a tree whose leaves have all ended."""

    step_id: str
    """A step that the agent sampled and a tool's result follows."""
    num: int
    cause: BranchCause


@dataclass(frozen=True, slots=True)
class Retry:
    """Opens siblings of a finished step, in a tree whose leaves have all ended. They keep its
    thought and begin a tool call or an answer, or they begin with other tokens."""

    step_id: str
    """A step that the agent sampled, below the prompt or a tool's result."""
    num: int
    rule: str
    """The name of the rule that chose it."""
    tool: str | None = None
    """The tool whose call begins; None for the one that the step called, or else the first. A
    format whose calls begin without a name leaves the choice to the policy."""
    opens: Literal["call", "answer"] = "call"
    """What it begins."""
    is_lesson: bool = False
    """Whether the opening is learned from where it paid, as a graft is."""
    opening: tuple[int, ...] = ()
    """The tokens they begin with, in place of the thought and the mark of a call or an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """The end of a trajectory: its reward and how it counts."""

    step_id: str
    """Its last step."""
    status: Status
    reward: float | None = None
    """None when failed or not yet scored."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted reward by function."""
    answer: str | None = None
    """The answer the agent gave; None without one."""
    is_correct: bool | None = None
    """Exact match or equal mathematics, never F1 or a bonus; None when failed or without a
    reference."""
    weight: float = 0.0
    """Share of its group, 0..1; the leaves of a group sum to 1, failed ones have 0."""
    advantage: float | None = None
    """None before credit and for failed leaves."""
    outcome_advantage: float | None = None
    """The same of the reward alone, before the retrieval reward's share; None as above."""
    retrieval_reward: float = 0.0
    """Mean over its grafts of how much they helped; 0 without one."""
    retrieved_frac: float = 0.0
    """Share of the tokens after the prompt that were grafted, 0..1."""
    shaping_factor: float | None = None
    """The factor of its ratios before clipping (RAPO, eq. 8); None before learning or
    where it was not learned from."""
    has_loss: bool = True
    """False where its own path gives no gradient (failed; truncated, where the recipe says so)."""
    error: str | None = None
    """The cause of the failure, for `Status.FAILED`."""
    environment_reward: float | None = None
    """The environment's reward for the state in which it ended; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetState:
    """The used part of a tree's budget."""

    num_leaves: int = 0
    num_tool_calls: int = 0
    num_sampled_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Tree(ShownTree):
    """All rollouts of one task. `print` writes it as text, a notebook in colours."""

    task: Task
    group_id: str
    """Unique per update and task, e.g. "12/search_world/train/17"."""
    steps: tuple[Step, ...]
    """In depth-first order; the first is the root."""
    leaves: tuple[Leaf, ...]
    """In depth-first order of their steps."""
    budget: BudgetState = BudgetState()

    def __post_init__(self) -> None:
        ids = [step.ordinals for step in self.steps]
        name = f"tree '{self.group_id}'"
        # The learner packs trees in this order, and runs are repeatable only if it is one order.
        in_order = all(a < b for a, b in itertools.pairwise(ids))
        if not ids or self.steps[0].id != ROOT_ID or not in_order:
            raise ValueError(
                f"{name}: steps must start with the root '0' and be in depth-first order"
            )
        # Checked here, since everything below goes by ids without a second look.
        known = {one.id for one in self.steps}
        inner = {one.before for one in self.steps}
        for step in self.steps[1:]:
            is_below = step.parent is None or f"{step.before}.".startswith(f"{step.parent}.")
            if step.before not in known or not is_below:
                raise ValueError(f"{name}: step '{step.id}' has no parent '{step.parent}' above it")
        for leaf in self.leaves:
            if leaf.step_id not in known or leaf.step_id in inner:
                raise ValueError(f"{name}: leaf '{leaf.step_id}' must be a step without children")

    @property
    def root(self) -> Step:
        return self.steps[0]

    def path(self, step_id: str) -> tuple[Step, ...]:
        """Returns the steps from the root to `step_id` in time, contexts written anew included."""
        by_id = {step.id: step for step in self.steps}
        return tuple(by_id[one] for one in ids_to(step_id))

    def trajectories(self) -> list[Trajectory]:
        """Returns one trajectory per leaf, in the order of the leaves."""
        found = []
        for leaf in self.leaves:
            path = self.path(leaf.step_id)
            steps = tuple(step for step in path if not step.is_context)
            contexts = tuple(step for step in path if step.is_context)
            one = Trajectory(task=self.task, leaf=leaf, steps=steps, contexts=contexts)
            found.append(one)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trajectory(ShownTrajectory):
    """One rollout: its steps in time, with the flat lists that users of TRL or verl expect. `print`
    and notebooks show it step by step.

    All lists have one entry per token of the whole path, prompt included; `sampled_mask` without
    the prompt's entries is called completion_mask or response_mask elsewhere. Where a context was
    written anew there is no such path: the lists raise a ValueError, and `rows` has them.
    """

    task: Task
    leaf: Leaf
    steps: tuple[Step, ...]
    """The root first."""
    contexts: tuple[Step, ...] = ()
    """The contexts that were written anew on the way; empty where steps only follow each other."""

    @property
    def num_loss_tokens(self) -> int:
        """|y|, the loss tokens of the whole path; of a stored trajectory, those that its agent
        wrote."""
        if self.is_stored:
            return sum(len(step.lesson_ids) for step in self.steps)
        return sum(step.num_loss_tokens for step in self.steps)

    def rows(self) -> list[Row]:
        """Returns the contexts of its steps as flat paths, as few as hold all: each ends with a
        step that no other one continues, and they come in the order of these."""
        by_id = {step.id: step for step in (*self.steps, *self.contexts)}
        in_time = sorted(by_id.values(), key=lambda step: step.ordinals)
        continued = {step.parent for step in in_time}
        found: list[Row] = []
        seen: set[str] = set()
        for last in in_time:
            if last.id in continued:
                continue
            steps = [last]
            while (parent := steps[-1].parent) is not None:
                steps.append(by_id[parent])
            steps.reverse()
            num_shared = sum(step.id in seen for step in steps)
            seen.update(step.id for step in steps)
            path = Trajectory(task=self.task, leaf=self.leaf, steps=tuple(steps))
            found.append(Row(path, num_shared))
        return found

    def _check_flat(self) -> None:
        if self.contexts or any(a.id != b.parent for a, b in itertools.pairwise(self.steps)):
            raise ValueError(
                f"trajectory '{self.leaf.step_id}': its steps saw contexts of their own, so it has"
                " no flat list of tokens; use rows(), each of which has."
            )

    def _joined(self, column: str) -> list[Any]:
        self._check_flat()
        return [value for step in self.steps for value in getattr(step, column).tolist()]

    @property
    def token_ids(self) -> list[int]:
        return self._joined("token_ids")

    @property
    def prompt_ids(self) -> list[int]:
        ids: list[int] = self.steps[0].token_ids.tolist()
        return ids

    @property
    def completion_ids(self) -> list[int]:
        self._check_flat()
        return [token for step in self.steps[1:] for token in step.token_ids.tolist()]

    @property
    def origins(self) -> list[Origin]:
        return [_ORIGINS[one] for one in self._joined("origins")]

    @property
    def sampled_mask(self) -> list[bool]:
        return self._joined("sampled_mask")

    @property
    def loss_mask(self) -> list[bool]:
        return [self.leaf.has_loss and one for one in self._joined("loss_mask")]

    @property
    def sampling_logprobs(self) -> list[float]:
        """0.0 where the token was not sampled."""
        return self._joined("sampling_logprobs")

    logprobs = sampling_logprobs
    """Alias of `sampling_logprobs`."""

    @property
    def entropies(self) -> list[float]:
        return self._joined("entropies")

    @property
    def token_advantages(self) -> list[float]:
        """What each token learns with: its step's advantage where attribution is hard, else the
        leaf's, times the token's credit factor; 0.0 where not sampled, and before credit."""
        self._check_flat()
        advantages: list[float] = []
        for step in self.steps:
            own = step.advantage_below(self.leaf)
            factors = [1.0] * step.num_tokens
            if step.credit_factors is not None:
                factors = step.credit_factors.tolist()
            for factor, is_sampled in zip(factors, step.sampled_mask.tolist(), strict=True):
                advantages.append(own * factor if is_sampled else 0.0)
        return advantages

    @property
    def reward(self) -> float | None:
        return self.leaf.reward

    @property
    def advantage(self) -> float | None:
        """The leaf's. Under hard attribution and with credit by token or step no token learns with
        it; `token_advantages` is right always."""
        return self.leaf.advantage

    @property
    def status(self) -> Status:
        return self.leaf.status

    @property
    def start_id(self) -> str:
        """The step below which its own rollout began: the root, or the last of the steps that it
        restarted below; of a retry, the step whose thought it began with. Trajectories are compared
        with those that began at the same place."""
        for step in reversed(self.steps):
            if isinstance(step.cause, RetryCause):
                return step.cause.beside
            if isinstance(step.cause, RestartCause):
                return str(step.before)
        return ROOT_ID

    @property
    def is_retry(self) -> bool:
        """Whether it begins with forced tokens beside a finished step."""
        return any(isinstance(step.cause, RetryCause) for step in self.steps)

    @property
    def is_stored(self) -> bool:
        """Whether it is a stored trajectory as a whole, of which nothing was sampled here."""
        return isinstance(self.steps[-1].cause, StoredCause)

    @property
    def contents(self) -> Iterator[StepContent]:
        """The content of each step after the prompt, in time."""
        return (step.content for step in self.steps[1:])

    @property
    def num_tool_calls(self) -> int:
        """Number of executed calls that the policy made."""
        own = (one for one in self.steps if one.origin is Origin.POLICY)
        return sum(len(one.content.observations) for one in own)


@dataclass(frozen=True, slots=True)
class Row:
    """A flat path to some steps of a trajectory, for trainers that learn from rows."""

    path: Trajectory
    """With the flat lists of its tokens; its steps are those whose contexts follow each other,
    written contexts included."""
    num_shared: int
    """How many of its first steps an earlier row has too: context here, learned from there."""
