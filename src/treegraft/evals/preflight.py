"""Checks before training, without a model's weights: the first tasks are written as the agent will
see them, and their references are scored as if the agent had answered them.

What would make every reward the same is found here, before any work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from treegraft.assemble import Parts
from treegraft.core.demonstration import solution
from treegraft.core.finding import Finding
from treegraft.core.interfaces import Span, Tool, signature_of
from treegraft.core.types import Leaf, Observation, StepContent, Task, ToolCall
from treegraft.tasks.reward_calls import is_async

# To a closed vocabulary both words are unknown, and no reference is that.
WRONG = "no idea"
"""An answer that no reference holds."""
NUM_TASKS = 8
"""Training tasks that are tried, from the first on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The first task as the agent will see it, and what it might write."""

    prompt: str
    call: str
    """A made call; empty without tools."""
    result: str
    """A made result, and the opening of the agent's next turn."""
    answer: str
    """The reference as the agent's answer; empty without a reference."""


class Preflight:
    """The checks of a run's setup."""

    def __init__(self, setup: Parts) -> None:
        self.setup = setup
        self.tasks = setup.train_tasks[:NUM_TASKS]

    def sample(self, shown: Task | None = None) -> Sample | None:
        """Returns the first task in the run's format; None without training tasks.

        Args:
            shown: that task as its environment begins it; None where there is none.

        Raises:
            DataError: its prompt cannot be made.
        """
        if not self.tasks:
            return None
        task = shown or self.tasks[0]
        tokenizer = self.setup.tokenizer

        def text(ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(ids), skip_special_tokens=False))

        spans = [text(ids) for ids, _ in self._spans(self._call)] if self._call else []
        answer = self._spans(self._answering(task.reference[0])) if task.reference else ()
        return Sample(
            prompt=text(self.setup.format.prompt_ids(task)),
            call=spans[0] if spans else "",
            result=spans[1] if len(spans) > 1 else "",
            answer=text(answer[0][0]) if answer else "",
        )

    async def findings(self) -> list[Finding]:
        """Returns what the checks have found; nothing for a setup without training tasks.

        Raises:
            DataError: a prompt that cannot be made.
        """
        if not self.tasks:
            return []
        return [*prompts(self), *calls(self), *lengths(self), *await references(self)]

    # ------------------------------------------------------------------ made steps

    @cached_property
    def is_closed(self) -> bool:
        """Whether the tokenizer knows the words of its tasks alone."""
        tokenizer = self.setup.tokenizer
        text = "zq7 know?"
        return bool(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) != text)

    @cached_property
    def _call(self) -> StepContent | None:
        """A step with a call and its result: the expert's, or a made one."""
        tools = list(self.setup.toolbox.tools.values())
        for step in solution(self.setup.source, self.tasks[0], 0) or ():
            if step.calls and step.observations:
                return step
        # There are no words for arguments of ours.
        if not tools or self.is_closed:
            return None
        call = ToolCall(tools[0].name, _made_body(tools[0]))
        return StepContent(thought="I look it up.", calls=(call,), observations=(_RESULT,))

    def _answering(self, answer: str) -> StepContent:
        thought = "" if self.is_closed else "I know."
        return StepContent(thought=thought, answer=answer)

    def _spans(self, content: StepContent) -> Sequence[Span]:
        """The tokens of a step; none where the format cannot say it."""
        try:
            return self.setup.format.render_step(content)
        except ValueError:
            return ()

    async def scored(self, task: Task) -> tuple[Leaf, Leaf] | None:
        """Returns the scored leaves of the reference as answer and of a wrong answer; None where
        the format cannot say one of them."""
        answers = [self._answering(one) for one in (task.reference[0], WRONG)]
        # As a whole tree, since rewards may compare the answers of a group.
        tree = self.setup.answered(task, answers)
        if tree is None:
            return None
        right, wrong = (await self.setup.scorer(tree)).leaves
        return right, wrong


def prompts(preflight: Preflight) -> list[Finding]:
    """Returns the lengths of prompts, and what they do not tell the agent."""
    setup = preflight.setup
    form = setup.config.format
    made = [setup.format.prompt_ids(task) for task in preflight.tasks]
    longest = max(map(len, made))
    found = [Finding("prompt", f"{len(made[0])} tokens; the longest of {len(made)}: {longest}")]
    found += _unknown(preflight, made)
    text = str(setup.tokenizer.decode(list(made[0]), skip_special_tokens=False))
    is_untaught = not setup.config.warmup.num_steps
    for name, mark in (("require_think", "<think>"), ("require_boxed", "\\boxed")):
        # A warm-up, or an earlier one of the same model, may have taught what no prompt says.
        if getattr(form, name) and mark not in text and is_untaught and not preflight.is_closed:
            note = "a step without it is a violation; set it to false, or ask for it"
            value = f"the prompt does not ask for {mark}"
            found.append(Finding(f"format.{name}", value, True, note, True))
    if is_untaught and setup.config.model.path == "tiny":
        found.append(Finding("warm-up", "none", True, _ADVICE_UNTAUGHT, True))
    if setup.config.environment.kind and setup.config.tasks.kind == "search_world":
        note = "the environment is asked the demo's questions; name its own tasks in [tasks]"
        found.append(Finding("tasks.kind", "search_world", True, note, True))
    return found


def _unknown(preflight: Preflight, made: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """The words of prompts that a closed vocabulary does not have: the model reads each of them as
    the same token."""
    setup = preflight.setup
    task = preflight.tasks[0]
    tokenizer = setup.tokenizer
    unknown = tokenizer.unk_token_id
    num = sum(list(ids).count(unknown) for ids in made)
    if not (preflight.is_closed and num):
        return
    texts = [setup.config.format.system_prompt or "", task.question]
    texts += [one["content"] for one in task.messages]
    words = [
        word
        for word in dict.fromkeys(" ".join(texts).split())
        if unknown in tokenizer.encode(word, add_special_tokens=False)
    ]
    num_all = sum(map(len, made))
    value = f"{num} of {num_all} tokens in {len(made)} prompts ({num / num_all:.0%})"
    named = ", ".join(f"'{word:.40}'" for word in words[:8]) + (", ..." if len(words) > 8 else "")
    note = f"of the first task: {named or 'none of its question'}; {_ADVICE_UNKNOWN}"
    yield Finding("unknown words", value, True, note, True)


_ADVICE_UNTAUGHT = (
    "random weights write neither calls nor answers. Set warmup.num_steps, with an expert of the"
    " tasks or demonstrations in warmup.traces, or name a language model in model.path"
)
_ADVICE_UNKNOWN = (
    "the tiny model reads all of them as <unk>. Add them to the task source's vocabulary(), leave"
    ' them out (format.system_prompt = ""), or name a language model in model.path'
)


def lengths(preflight: Preflight) -> list[Finding]:
    """Returns whether a call, its result and the reference fit in a trajectory."""
    # The limit counts results of tools too, as the model reads them.
    limit = preflight.setup.config.rollout.max_completion_tokens
    call = preflight._spans(preflight._call) if preflight._call else ()
    num_call = sum(len(ids) for ids, _ in call)
    wanted = 0
    for task in preflight.tasks:
        if task.reference:
            answer = preflight._spans(preflight._answering(task.reference[0]))
            wanted = max(wanted, sum(len(ids) for ids, _ in answer))
    value = f"{limit} tokens; an answer takes {wanted}"
    value += f", a call with its result {num_call} or more" if call else ""
    name = "rollout.max_completion_tokens"
    if wanted > limit:
        return [Finding(name, value, False, "not even the reference's answer fits; raise it")]
    if wanted + num_call > limit:
        return [Finding(name, value, True, "a call and an answer do not fit; raise it", True)]
    return [Finding(name, value)]


def calls(preflight: Preflight) -> list[Finding]:
    """Returns whether a call is read back as it was written."""
    step = preflight._call
    form = preflight.setup.format
    if step is None:
        return []
    name = step.calls[0].name
    try:
        spans = form.render_step(step)
    except ValueError as error:
        return [Finding(f"call of {name}", "cannot be written", False, str(error))]
    # A template that drops a call's arguments would make each call a violation.
    parsed = form.parse_step(spans[0][0])
    is_same = parsed.violation is None and len(parsed.content.calls) == len(step.calls)
    value = "is written and read back" if is_same else "is not read back"
    return [Finding(f"call of {name}", value, is_same, parsed.violation or "")]


async def references(preflight: Preflight) -> list[Finding]:
    """Returns whether the references are rewarded, and better than a wrong answer."""
    setup = preflight.setup
    # An environment's reward is that of its state, which nobody has moved here; a call of a
    # coroutine function may cost something.
    if setup.kind or any(is_async(one) for _, one, _ in setup.rewards):
        return []
    num_tried = 0
    unsaid: list[Task] = []
    incorrect: list[tuple[Task, Leaf]] = []
    scored: list[tuple[Leaf, Leaf]] = []
    failures: list[str] = []
    for task in preflight.tasks:
        if not task.reference:
            continue
        num_tried += 1
        pair = await preflight.scored(task)
        if pair is None:
            unsaid.append(task)
            continue
        right, wrong = pair
        if right.is_correct is False:
            incorrect.append((task, right))
        if right.reward is not None and wrong.reward is not None:
            scored.append(pair)
        for leaf in pair:
            failures.extend(filter(None, [leaf.error]))
    found = []
    if failures:
        found.append(Finding("rewards", "failed", False, failures[0]))
    if unsaid:
        value = f"{len(unsaid)} of {num_tried} references cannot be written as an answer"
        note = f"the first: {unsaid[0].reference[0]!r:.80} of task '{unsaid[0].id}'"
        is_good = len(unsaid) < num_tried
        found.append(Finding("references as answers", value, is_good, note, True))
    if incorrect:
        task, leaf = incorrect[0]
        num = num_tried - len(unsaid)
        value = f"{len(incorrect)} of {num} do not count as correct when the agent gives them"
        note = (
            f"'{task.reference[0]:.60}' of task '{task.id}' was read as {leaf.answer!r:.60}; see"
            " format.answer and tasks.dataset.reference_after"
        )
        found.append(Finding("correctness", value, len(incorrect) < num, note, True))
    return found + _alike(scored)


def _alike(scored: Sequence[tuple[Leaf, Leaf]]) -> list[Finding]:
    """Whether the reference earns more than a wrong answer, by the leaves of both."""
    if not scored:
        return []
    num_better = 0
    shown = scored[0]
    for right, wrong in reversed(scored):
        if (right.reward or 0.0) > (wrong.reward or 0.0):
            num_better += 1
            shown = (right, wrong)
    value = f"{_rewards(shown[0])} for the reference, {_rewards(shown[1])} for a wrong answer"
    if num_better:
        num_alike = len(scored) - num_better
        note = f"alike for {num_alike} tasks" if num_alike else ""
        return [Finding("reward", value, True, note, bool(note))]
    note = (
        "the reference earns no more than a wrong answer, so nothing could be learned from answers;"
        " see how the function reads the answer shown below"
    )
    return [Finding("reward", value, False, note)]


def _rewards(leaf: Leaf) -> str:
    parts = ", ".join(f"{name} {value:g}" for name, value in leaf.reward_parts.items())
    return f"{leaf.reward:g} ({parts})" if len(leaf.reward_parts) > 1 else f"{leaf.reward:g}"


_RESULT = Observation(text="(the tool's result)")


def _made_body(tool: Tool) -> str:
    """A body that fits a tool's signature: a text, or JSON with the required arguments."""
    signature = signature_of(tool)
    if signature.text_parameter is not None:
        return "1 + 1"
    return json.dumps(dict.fromkeys(signature.schema.get("required", ()), "..."))
