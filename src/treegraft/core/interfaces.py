"""The protocols between the parts; a user may replace each part by an import path in the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from treegraft.core.errors import ToolError
from treegraft.core.types import (
    Branch,
    Completion,
    Expand,
    Generate,
    Graft,
    Observation,
    Origin,
    ParsedStep,
    PathView,
    Retry,
    Sampling,
    Start,
    StepContent,
    Stored,
    Task,
    Trace,
    Tree,
)

Span = tuple[tuple[int, ...], Origin]
"""Token ids that one author wrote."""

NoiseKey = tuple[int | str, ...]
"""The key of reproducible randomness: (seed, purpose, update, task id, path of child ordinals)."""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that formats and engines use."""

    chat_template: str | None
    eos_token_id: int | None

    def encode(self, text: str, **kwargs: Any) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...
    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...
    def __len__(self) -> int: ...


class Measured(Protocol):
    """A part of a run that counts something."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the metrics since the last call and resets the counts."""


class WeightSource(Protocol):
    """The weights of a policy on their way from the learner to an engine."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the plain model's tensors, after adapters are merged."""

    @property
    def fingerprint(self) -> str:
        """Checksum of all tensors; see `Engine.fingerprint`."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Gives (name, whole tensor), one at a time, so that no second copy has to exist."""


class LogprobScorer(Protocol):
    """What scores trees by the present weights: a learner, alone or with other ranks."""

    def with_logprobs(self, trees: Sequence[Tree]) -> list[Tree]:
        """Returns the trees with the log-probabilities of their sampled tokens under the present
        weights as `Step.old_logprobs`."""


class EntropyScorer(Protocol):
    """What scores the entropies that an engine does not know."""

    def with_exact_entropies(
        self, trees: Sequence[Tree], *, everywhere: bool = False
    ) -> list[Tree]:
        """Returns the trees with exact entropies around grafts, for the retrieval reward; with
        `everywhere`, at all steps of all trees where one of them has such a graft."""


class LearnerLike(LogprobScorer, EntropyScorer, Protocol):
    """What changes the policy's weights, in one process or in several."""

    def learn(
        self, trees: Sequence[Tree], lessons: Sequence[Tree] = (), spent: float = 0.0
    ) -> tuple[list[Tree], dict[str, float]]:
        """Returns the trees with old log-probabilities and ratios filled in, and the update's
        metrics; stored trajectories are learned with them, by their leaves' advantages. `spent`
        is the share of the run's limit of calls or tokens, for a schedule."""

    def imitate(self, trees: Sequence[Tree], lr: float, weight_decay: float | None = None) -> float:
        """Takes one optimiser step on demonstrations and returns their mean loss per token, NaN if
        the step was skipped. The default of `weight_decay` is that of [learn]."""

    def forget_moments(self) -> None:
        """Resets the optimiser's moments, such as between warm-up and training."""

    def keep_reference(self, folder: Path | None, *, is_new: bool) -> None:
        """Freezes the present weights as the reference of the KL term and writes them to the
        folder, None for nowhere; a resumed run reads the reference from there."""

    def weights(self) -> WeightSource:
        """Returns the plain model's weights with adapters merged into them."""

    def save(self, folder: Path) -> None:
        """Writes the plain model and the optimiser's state into the folder of a checkpoint."""


@dataclass(frozen=True, slots=True)
class Request:
    """What an engine is asked for: one completion of a path.

    Request((5, 6), Sampling(max_new_tokens=8), noise_key=(0, "train", 1, "task", "0.1"))
    """

    prefix_ids: Sequence[int]
    """[tokens] The whole path so far, of at least one token."""
    sampling: Sampling
    """The temperature, the most tokens, and which texts end the completion."""
    noise_key: NoiseKey
    """The completion is a function of it, the prefix, the sampling and the weights alone."""
    probe_tokens: int | None = None
    """How many sampled tokens `on_probe` waits for, at least 1; None: it is never called."""
    on_probe: Callable[[Sequence[float]], None] | None = None
    """Called at most once, on the caller's event loop, with the entropies of the first
    `probe_tokens` tokens in nats; not for a shorter completion. None: nobody waits for them."""


@runtime_checkable
class Engine(Measured, Protocol):
    """Turns token ids into more token ids. Stateless for the caller."""

    @property
    def policy_version(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Number of completions that run at the same time; further ones wait."""

    @property
    def max_context(self) -> int | None:
        """Longest path that the engine completes, prompt included, in tokens; None without a
        limit."""

    @property
    def fingerprint(self) -> str:
        """Checksum of the weights it samples from, equal to the learner's after a publish; empty
        where there are no weights."""

    @property
    def death(self) -> BaseException | None:
        """Why the engine can complete nothing any more; None while it serves."""

    async def complete(self, request: Request) -> Completion:
        """Returns one completion, by one version of the policy.

        Raises:
            EngineError: a request that it cannot serve, or it has died.
            DeadlineExceeded: no completion in time.
        """

    async def publish(self, source: WeightSource, version: int) -> None:
        """Takes over new weights once running requests are done; later completions carry
        `version`. Weights that it has already (the fingerprints are equal) need not be copied."""

    async def close(self) -> None: ...


class Capability(StrEnum):
    """How a tree can branch over a tool's state."""

    STATELESS = "stateless"
    """Nothing to copy."""
    FORK = "fork"
    """Its state can be copied."""
    REPLAY = "replay"
    """Its state can be rebuilt from recorded calls."""
    NONE = "none"
    """Neither: a tree that would branch over it is refused."""


@runtime_checkable
class Tool(Protocol):
    """A named async function from text to text.

    Raises `ToolError` for a mistake of the agent and `ToolUnavailable` for a failure of the
    service; any other exception counts as the agent's (its text becomes the observation).

    Three further attributes may be there: `is_remote` (True: calls are retried where the service
    failed, and their rate is limited), `fingerprint` (a text that changes with anything that
    results depend on besides the body: the results of a cacheable tool with one may be stored on
    disk and used by other runs) and `deadline_s` (longest wait for a call, in seconds, in place of
    that of the settings).
    """

    name: str
    """The name in the agent's calls; as a tag of the tags format, lower-case letters and
    underscores."""
    description: str
    """One or two sentences for the system prompt."""
    capability: Capability
    cacheable: bool
    """The same body always gives the same result, for every task (or the body names the task)."""

    async def __call__(self, body: str, task: Task) -> str: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Passage:
    r"""Passage(id="12", contents="\"Paris\"\nThe capital of France ...", score=7.3)"""

    id: str | int
    contents: str
    """As in the corpus; in the wiki-18 dump a title in quotes, a line break, and the text."""
    score: float
    """Its match with the query, higher is better; the scale depends on the index."""


class SearchBackend(Protocol):
    """Where passages come from."""

    is_remote: bool
    """Whether a service elsewhere answers, so that calls are retried and their rate is limited."""

    @property
    def fingerprint(self) -> str:
        """A text that changes whenever results of the same query would."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """Returns for each query its best passages, best first, `top_k` at most.

        Raises `ToolUnavailable` where the service behind it is down, and `ToolError` for a query
        that it refuses.
        """

    async def close(self) -> None: ...


@runtime_checkable
class Environment(Protocol):
    """The world of one trajectory, as a class of the user's (TRL's convention): a fresh object for
    each trajectory.

    Its other public methods, typed and with docstrings, are the agent's tools, except these, which
    may be missing: `get_reward()` returns the reward of the state in which the trajectory ended,
    `fork()` a further object in the same state, `close()` frees its resources. Every method may be
    async; a plain one runs in a thread that belongs to the object and its forks, or without one
    where the class attribute `is_blocking` is False. The class attribute `capability` ("fork",
    "replay" or "none") says how a tree may branch over the state.
    """

    def reset(self, **row: Any) -> Any:
        """Begins a task, and returns a text that the agent reads after the question; None for
        nothing.

        Args:
            row: the task's columns, and `question`, `prompt` (the same), `reference`, `task_id` and
                `seed` (a number that depends on the task alone); a method without ** gets those it
                names. Equal rows must begin equally.
        """


class LiveEnvironment(Protocol):
    """One environment under way, behind one interface for all kinds. Its calls come one after
    another."""

    async def reset(self, task: Task) -> str:
        """Returns the first observation; empty for none."""

    async def call(self, name: str, body: str, task: Task) -> Any:
        """Returns the result of one of the kind's tools; raises as a `Tool` does."""

    async def reward(self) -> Any:
        """Returns the reward of the present state; None for none."""

    async def fork(self) -> LiveEnvironment:
        """Returns a copy in the same state; later calls change only one of both."""

    async def close(self) -> None: ...


class EnvironmentKind(Protocol):
    """Makes the environments of a run."""

    name: str
    """Its name in messages."""
    capability: Capability
    """How a tree may branch over its state; never stateless."""
    tools: Sequence[Tool]
    """The agent's actions in it; they are called through a session alone."""
    has_reward: bool
    """Whether its environments have rewards."""

    def make(self) -> LiveEnvironment:
        """Returns a fresh environment that is not yet reset. Does no work."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a tool, for formats that show them by name; a tool may have one as its
    attribute `signature`.

    Signature({"type": "object", "properties": {"query": {"type": "string"}}, "required":
    ["query"]}, text_parameter="query")
    """

    schema: Mapping[str, Any]
    """JSON schema of an object of the arguments."""
    text_parameter: str | None = None
    """The one argument that is a call's whole body; None where the body is the JSON
    object."""

    def requires(self, name: str) -> bool:
        """Returns whether a call needs this argument."""
        return name in self.schema.get("required", ())

    @classmethod
    def of_text(cls, name: str = "input", description: str = "") -> Signature:
        """Returns the signature of a tool with one text."""
        described = {"type": "string"} | ({"description": description} if description else {})
        return cls({"type": "object", "properties": {name: described}, "required": [name]}, name)

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any]) -> Signature:
        """Returns the signature of a tool with this JSON schema; a single text is a call's whole
        body."""
        # A single text needs no JSON around it, which small models write badly.
        properties = schema.get("properties") or {}
        single = next(iter(properties)) if len(properties) == 1 else ""
        described = properties.get(single)
        is_text = isinstance(described, Mapping) and described.get("type") == "string"
        return cls(dict(schema), single if is_text else None)

    def arguments(self, body: str, name: str) -> dict[str, Any]:
        """Returns the arguments of a call; none for an empty body.

        Raises `ToolError`, with the tool's name, for a body that is no JSON object.
        """
        if (parameter := self.text_parameter) is not None:
            return {parameter: body} if body.strip() or self.requires(parameter) else {}
        # The agent reads it, so it says what to write.
        needs = f"{name} needs a JSON object of its arguments"
        arguments = read_json(body, needs) if body.strip() else {}
        if not isinstance(arguments, dict):
            raise ToolError(f"{needs}; got {type(arguments).__name__}", code="arguments-no-object")
        return arguments


def read_json(body: str, needs: str) -> Any:
    """Returns a call's body as JSON. Raises `ToolError`, which begins with `needs`, for other
    texts."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ToolError(f"{needs}; this is not JSON: {error}", code="arguments-no-json") from None


def signature_of(tool: Tool) -> Signature:
    """Returns the tool's own signature; for a tool without one, that of a text named "input"."""
    own: Signature | None = getattr(tool, "signature", None)
    return Signature.of_text() if own is None else own


class Format(Protocol):
    """How steps become tokens and back: the only place that knows markup."""

    stop: tuple[str, ...]
    """Ends of tool calls; after one the tool is run."""
    final: tuple[str, ...]
    """Ends of a final answer."""
    notes: tuple[str, ...]
    """Remarks for the user on how it came about."""

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Returns the tokens before the first sampled one."""

    def parse_step(self, token_ids: Sequence[int]) -> ParsedStep:
        """Returns the content of one step of the policy (its own tokens only, end-of-sequence
        included)."""

    def answer_of(self, content: StepContent, task: Task) -> str | None:
        """Returns the answer that a step gives to the task, as it is compared with the reference;
        None without one."""

    def written_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of one step of the policy as it wrote it, markup included and the end
        token left out."""

    def observation_ids(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Returns results as tokens with the markup around them. Foreign text cannot forge a tag
        or an end token."""

    def render_step(self, content: StepContent) -> tuple[Span, ...]:
        """Returns a step as tokens with their authors, as the policy would have written it.

        Raises:
            ValueError: a content that this format cannot say.
        """

    def render_graft(
        self, values: Sequence[str | StepContent], max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Returns steps of another agent as tokens that the policy reads and must not write
        itself.

        Args:
            max_tokens: cut the oldest text away down to this length; None cuts nothing.
        """


@runtime_checkable
class Rewriting(Protocol):
    """The further members of a format that can show earlier steps to later ones otherwise than they
    were written: without their thoughts, as many chat templates do."""

    drops_thoughts: bool
    """Whether it does."""

    def context_spans(
        self, token_ids: Sequence[int], observations: Sequence[Observation]
    ) -> tuple[Span, ...]:
        """Returns one step of the policy without its thought, of origin CONTEXT, and its results.

        Args:
            token_ids: the step's own tokens, end-of-sequence included; it made calls and broke no
                rule.
        """


@runtime_checkable
class Conversing(Protocol):
    """The further method of a format that writes the context of a step from the whole conversation
    before it."""

    def context_ids(
        self,
        task: Task,
        turns: Sequence[tuple[Sequence[int], StepContent]],
        before: Sequence[int],
    ) -> tuple[int, ...]:
        """Returns the tokens of the next step's context.

        Args:
            turns: the policy's own tokens of each step so far, end-of-sequence included and none
                for a stored step, and its content with results.
            before: [tokens] the context of the last of these steps.
        """


@runtime_checkable
class Serving(Format, Protocol):
    """A format that also writes the conversations of programs which write their own prompts."""

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> Serving:
        """Returns a format for conversations with other tools, described as in OpenAI's requests.
        It has no system prompt and no rule for thoughts and answers."""

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Returns the text of tokens, special ones included."""

    def conversation_ids(
        self, messages: Sequence[Mapping[str, Any]], earlier: Iterable[tuple[str, Sequence[int]]]
    ) -> list[int]:
        """Returns the tokens of a whole conversation and of the opening of the agent's turn.

        Args:
            messages: in the shape that chat templates read; no text can forge a special token, and
                none of a tool's result a mark.
            earlier: texts and the tokens that they were read or sampled as; the longest text that
                the conversation begins with keeps its tokens.
        """

    def message(self, token_ids: Sequence[int], number: int) -> tuple[dict[str, Any], str | None]:
        """Returns a turn as a message of OpenAI's chat completions, and which rule the turn broke;
        such a turn is all content.

        Args:
            number: of the turn in its conversation; the ids of its calls depend on it.
        """

    def split_answer(self, body: str) -> tuple[str, str]:
        """Returns the text before the answer and the answer. Raises Violation for none."""


@runtime_checkable
class Opening(Protocol):
    """The further methods of a format in which a tool call or an answer can be begun for the
    policy; explorers whose `fill` returns `Retry` need it.

    Each returns the thought of one step of the policy and the tokens that begin the call or the
    answer. `parse_step` reads them, with what the policy samples after them, as one step.
    """

    def call_opening(self, token_ids: Sequence[int], tool: str | None) -> tuple[int, ...]:
        """Returns the beginning of a call.

        Args:
            token_ids: the step's own tokens, end-of-sequence included.
            tool: the tool that is called; None for the one that the step called, or else the first.
        """

    def answer_opening(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the beginning of an answer."""


class TaskSource(Protocol):
    """A data set of tasks. Reading it is repeatable: the same settings give the same tasks."""

    def train_tasks(self) -> Sequence[Task]: ...

    def eval_tasks(self) -> Sequence[Task]: ...

    def tools(self) -> Sequence[Tool]:
        """Returns the tools that belong to the tasks themselves (a world's own search); often
        none."""

    def expert(self, task: Task, seed: int) -> tuple[StepContent, ...] | None:
        """Returns a scripted expert's solution as steps with observations, or None where there is
        no expert."""

    def early_answer(self, task: Task, steps: Sequence[StepContent]) -> str | None:
        """Returns the answer that an impatient agent would give after these steps; None if there is
        none."""

    def warmup_tasks(self, num: int, seed: int) -> Sequence[Task]:
        """Returns tasks for demonstrations, disjoint from training and evaluation; empty where
        there is no expert."""

    def vocabulary(self) -> Sequence[str]:
        """Returns every word of questions, results and answers for a word-level tokenizer; empty
        for open language."""

    def report(self) -> Sequence[str]:
        """Returns the defects found while reading, one sentence each; they are not fatal."""


class TaskSampler(Protocol):
    """Deals the training tasks of a run. Its tasks are a function of the seed, the update's number
    and `state`, so that a resumed run deals the same. One process asks it, update after update."""

    @property
    def state(self) -> Mapping[str, Any]:
        """What it has learned from the updates so far, as JSON; it is part of a checkpoint."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of a checkpoint, which is empty for a new run."""

    def references(self, number: int) -> Sequence[Task]:
        """Returns tasks that are rolled out before update `number` to estimate the other tasks'
        success; they are not learned from. Often empty."""

    def label(self, number: int, trees: Sequence[Tree]) -> None:
        """Takes the scored trees of the references."""

    def draw(
        self, number: int, first: int, *, size: int, without: Collection[str] = ()
    ) -> Sequence[Task]:
        """Returns at most `size` different tasks for update `number`; empty if all are left out.

        Args:
            first: tasks drawn before, by all updates and by earlier rounds of this one.
            without: ids of tasks that this update has drawn already.
        """

    def take(self, number: int, trees: Sequence[Tree]) -> None:
        """Takes the scored trees of an update, without those of its references."""

    def drawn(self, first: int) -> Sequence[str]:
        """Returns the ids of the `first` tasks that earlier updates drew; they may repeat."""

    def take_metrics(self) -> dict[str, float]:
        """Returns the sampler/* metrics of the last update."""


RewardFunc = Callable[..., Any]
"""TRL's keyword signature: func(*, prompts, completions, completion_ids, trajectories, **columns)
-> list of floats or None; or verl's, func(data_source, solution_str, ground_truth, extra_info) ->
float, called once per trajectory.

`completions` hold all that the agent wrote, tool results left out; `trajectories` the whole
`Trajectory` objects; every column of the data set arrives as a list of its own name, and
`reference`, the accepted answers as texts, where no column has that name. For tasks that came as
chat messages `prompts` and `completions` are lists of messages. May be async. None: does not apply
to that trajectory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieved:
    """The result of a retrieval."""

    traces: tuple[Trace, ...]
    """One step, or the rest of a trajectory in order; never empty."""
    similarity: float
    """Cosine between the query and the first trace's key, -1..1; 0 where it was drawn at random."""
    others: tuple[Retrieved, ...] = ()
    """The next nearest, for an environment in which the first one does not come true; empty where
    there is no environment."""
    task_id: str = ""
    """Of the first trace; where that has none, of the task asked about if it has its question."""

    @property
    def values(self) -> list[str | StepContent]:
        """The steps of the traces."""
        return [trace.value for trace in self.traces]


class Retriever(Measured, Protocol):
    """Finds steps of other agents in a situation like this one."""

    async def retrieve(
        self, task: Task, contents: Sequence[StepContent], *, whole: bool, noise_key: NoiseKey
    ) -> Retrieved | None:
        """Returns the trace whose key is nearest to the history; None if nothing is eligible.

        Args:
            contents: the steps so far, oldest first.
            whole: the rest of the trace's trajectory instead of the one step.
            noise_key: a random draw is a function of it.
        """

    async def trajectories(self, task: Task) -> Sequence[tuple[Trace, ...]]:
        """Returns the stored trajectories of the task itself, whole and in order, best first; asked
        for an explorer with `restarts`."""


class Explorer(Protocol):
    """Decides where a tree grows. Pure: a function of tree facts and of keyed randomness, never of
    arrival.

    `explore.independent.Independent` has a default for every member; derive from it. An explorer
    that begins rollouts below stored steps is a `Restarting` too.
    """

    @property
    def probe_tokens(self) -> int | None:
        """How many first tokens of a step after a tool result `after_probe` wants to see; None: it
        is never asked."""

    expands: bool
    """Whether `fill` may return `Expand` or `Retry`: the states between steps then stay until
    the tree is done, a copy each of an environment that forks."""
    retries: bool
    """Whether `fill` may return `Retry`; the format has to be an `Opening` then."""
    wants_rewards: bool
    """Whether `fill` gets the tree scored; reward functions then see it once before each call of
    `fill`, with all of its leaves so far."""
    has_stages: bool
    """Whether `fill` follows a first stage only where its rewards ask for more."""
    plans_starts: bool
    """False where `starts` are fewer than it may open in `fill`."""

    def starts(self, max_leaves: int) -> Start:
        """Returns how many first-level rollouts to open, 1..max_leaves."""

    def is_hybrid(self, start: int) -> bool:
        """Returns whether rollouts of this first-level ordinal may retrieve steps."""

    def before_step(self, path: PathView) -> Generate | Graft:
        """Returns whether the path's next step is sampled or retrieved; never asked for a first
        step or after a graft."""

    def after_probe(self, path: PathView, probe: Sequence[float]) -> Branch | None:
        """Returns whether to open further siblings of the step under way, below a step that has
        tool results.

        None and a `Branch` of 0 open none; the latter records the numbers that the rule saw.

        Args:
            path: ends with the step that the children would hang below.
            probe: entropies in nats of the first tokens, at most `probe_tokens`, of the step under
                way.
        """

    def fill(self, tree: Tree, max_leaves: int) -> Start | Sequence[Expand | Retry]:
        """Returns what to open once all leaves have ended, as long as the tree has fewer than
        `max_leaves`: further first-level rollouts, or children or siblings of finished steps.
        Nothing ends the tree."""


@runtime_checkable
class Restarting(Protocol):
    """The further method of an explorer that begins rollouts below steps of stored trajectories,
    in place of `fill`."""

    def restarts(
        self, tree: Tree, stored: Sequence[Stored], max_leaves: int, noise_key: NoiseKey
    ) -> Sequence[Start]:
        """Returns what to open next; nothing ends the tree.

        Asked first with a tree that has no leaf, in place of `starts`, whose number says only how
        many environments to prepare; then whenever all leaves have ended, with the tree scored
        where the attribute `wants_rewards` is True. A stored trajectory that an environment
        contradicts is missing from `stored` the next time, as an entry without steps and answer.

        Args:
            stored: those of the task, best first.
            noise_key: of the tree.
        """


CreditRule = Callable[[Tree], Tree]
"""Takes a tree whose leaves have rewards and the credit of the settings, returns it with other
advantages and nothing else changed.

`Leaf.advantage` goes to all tokens of the trajectory that the policy sampled; `Step.advantage`,
where it is not None, takes its place for the tokens of that step, on every trajectory that contains
it; `Step.credit_factors` multiply it token by token. Failed leaves keep None.
"""


class Tracker(Protocol):
    """Takes the metrics of each update; made once for a run, with the path of its folder. Its
    errors never end the run.

    It may have more: `place`, a text that says where its records are; `sample(update, trees)` for
    the trees of an update after learning, before its metrics; `warn(update, name, text)` for a
    warning that begins."""

    def log(self, update: int, metrics: Mapping[str, float]) -> None:
        """Update 0 is the state before the first. Present warnings are metrics
        "health/NAME"."""

    def close(self) -> None:
        """Ends the tracker's work. The process goes on, and a later run may resume its record."""


class TreeScorer(Protocol):
    """Fills in reward, status and correctness of a tree's leaves."""

    async def __call__(self, tree: Tree) -> Tree: ...


class Display(Protocol):
    """Shows the progress of a run. Methods return at once, and no fault of the run makes them
    raise."""

    def started(self, run_dir: Path, title: str, num_updates: int) -> None:
        """The run folder exists and work begins; `title` names model and tasks."""

    def phase(self, name: str, done: int, total: int, detail: str = "") -> None:
        """`done` of `total` parts of the phase are done (total 0: unknown); `detail` names the
        waits under way."""

    def update(self, update: int, num_updates: int, metrics: Mapping[str, float]) -> None:
        """An update has ended."""

    def evaluated(self, name: str, metrics: Mapping[str, float]) -> None:
        """An evaluation has ended; `name` says of what ("update 5", "start")."""

    def sample(self, tree: Tree) -> None:
        """A scored tree to show one trajectory of."""

    def warn(self, text: str) -> None:
        """Something is not as it should be, and the run goes on."""

    def note(self, text: str) -> None:
        """Something worth a line that is no warning."""

    def finished(
        self, run_dir: Path, checkpoint_dir: Path | None, metrics: Mapping[str, float]
    ) -> None:
        """The run is complete."""

    def interrupted(self, resume_command: str, is_saved: bool = True) -> None:
        """The run was stopped; `is_saved`: with its progress saved."""

    def close(self) -> None:
        """Gives the terminal back; may be called twice."""
