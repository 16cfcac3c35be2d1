"""Checks before training, without a model's weights: the first tasks are written as the agent will
see them, and their references are scored as if the agent had answered them.

What would make every reward the same is found here, before any work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property

from treegraft.assemble import Parts
from treegraft.core.demonstration import solution
from treegraft.core.finding import Finding
from treegraft.core.interfaces import Span, Tool, signature_of
from treegraft.core.types import Observation, StepContent, Task, ToolCall
from treegraft.tasks.reward_calls import is_async

# To a closed vocabulary both words are unknown, and no reference is that.
WRONG = "no idea"
"""An answer that no reference holds."""
NUM_TASKS = 8
"""Training tasks that are tried, from the first on."""


class Preflight:
    """The checks of a run's setup."""

    def __init__(self, setup: Parts) -> None:
        self.setup = setup
        self.tasks = setup.train_tasks[:NUM_TASKS]

    def sample(self, shown: Task | None = None) -> dict[str, str]:
        """Returns the first task in the run's format as "prompt", a made "call" with its "result"
        and the opening of the agent's next turn, and the reference as the agent's "answer"; empty
        without training tasks.

        Args:
            shown: that task as its environment begins it; None without an environment.

        Raises:
            DataError: its prompt cannot be made.
        """
        if not self.tasks:
            return {}
        task = shown or self.tasks[0]
        texts = {"prompt": self._text(self.setup.format.prompt_ids(task))}
        # The names run out before the spans: a step without a result has fewer.
        for name, (ids, _) in zip(("call", "result"), self._spans(self._call), strict=False):
            texts[name] = self._text(ids)
        if task.reference:
            for ids, _ in self._spans(self._answering(task.reference[0]))[:1]:
                texts["answer"] = self._text(ids)
        return texts

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.setup.tokenizer.decode(list(ids), skip_special_tokens=False))

    async def findings(self) -> list[Finding]:
        """Returns what the checks have found; nothing for a setup without training tasks.

        Raises:
            DataError: a prompt that cannot be made.
        """
        if not self.tasks:
            return []
        return [
            *self._of_prompts(),
            *self._of_calls(),
            self._of_lengths(),
            *await self._of_rewards(),
        ]

    # ------------------------------------------------------------------ made steps

    @cached_property
    def _is_closed(self) -> bool:
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
        if not tools or self._is_closed:
            return None
        call = ToolCall(tools[0].name, _made_body(tools[0]))
        result = Observation(text="(the tool's result)")
        return StepContent(thought="I look it up.", calls=(call,), observations=(result,))

    def _answering(self, answer: str) -> StepContent:
        thought = "" if self._is_closed else "I know."
        return StepContent(thought=thought, answer=answer)

    def _spans(self, content: StepContent | None) -> Sequence[Span]:
        """The tokens of a step; none for no step, or if the format cannot say it."""
        if content is None:
            return ()
        try:
            return self.setup.format.render_step(content)
        except ValueError:
            return ()

    # ------------------------------------------------------------------ the checks

    def _of_prompts(self) -> Iterator[Finding]:
        """The lengths of prompts, and what they do not tell the agent."""
        setup = self.setup
        made = [setup.format.prompt_ids(task) for task in self.tasks]
        longest = max(map(len, made))
        yield Finding("prompt", f"{len(made[0])} tokens; the longest of {len(made)}: {longest}")
        num_unknown = list(made[0]).count(setup.tokenizer.unk_token_id)
        if self._is_closed and num_unknown:
            value = f"{num_unknown} of {len(made[0])} tokens in the first prompt"
            yield Finding("unknown words", value, True, _ADVICE_UNKNOWN, True)
        if setup.config.warmup.num_steps:
            # It teaches what no prompt says.
            return
        text = self._text(made[0])
        form = setup.config.format
        for name, mark in (("require_think", "<think>"), ("require_boxed", "\\boxed")):
            if getattr(form, name) and mark not in text and not self._is_closed:
                note = "a step without it is a violation; set it to false, or ask for it"
                value = f"the prompt does not ask for {mark}"
                yield Finding(f"format.{name}", value, True, note, True)
        if setup.config.model.path == "tiny":
            yield Finding("warm-up", "none", True, _ADVICE_UNTAUGHT, True)

    def _of_calls(self) -> Iterator[Finding]:
        """Whether a call is read back as it was written."""
        # An agent that owns its loop brings its own tools.
        if self._call is None or self.setup.config.agent.run:
            return
        name = f"call of {self._call.calls[0].name}"
        form = self.setup.format
        try:
            spans = form.render_step(self._call)
        except ValueError as error:
            yield Finding(name, "cannot be written", False, str(error))
            return
        # A template that drops a call's arguments would make each call a violation.
        parsed = form.parse_step(spans[0][0])
        num_read = len(parsed.content.calls)
        is_same = parsed.violation is None and num_read == len(self._call.calls)
        value = "is written and read back" if is_same else "is not read back"
        yield Finding(name, value, is_same, parsed.violation or "")

    def _of_lengths(self) -> Finding:
        """Whether a call, its result and the first task's reference fit in a trajectory."""
        # The limit counts results of tools too, as the model reads them.
        limit = self.setup.config.rollout.max_completion_tokens
        call = sum(len(ids) for ids, _ in self._spans(self._call))
        answer = 0
        if self.tasks[0].reference:
            spans = self._spans(self._answering(self.tasks[0].reference[0]))
            answer = sum(len(ids) for ids, _ in spans)
        name = "rollout.max_completion_tokens"
        value = f"{limit} tokens; an answer takes {answer}, a call with its result {call}"
        if answer > limit:
            return Finding(name, value, False, "not even the reference's answer fits; raise it")
        if answer + call > limit:
            return Finding(name, value, True, "a call and an answer do not fit; raise it", True)
        return Finding(name, value)

    async def _of_rewards(self) -> list[Finding]:
        """Whether the references are rewarded, and better than a wrong answer."""
        setup = self.setup
        # An environment's reward is that of its state, which nobody has moved here; a call of a
        # coroutine function may cost something.
        if setup.kind or any(is_async(one) for _, one, _ in setup.rewards):
            return []
        tried = [task for task in self.tasks if task.reference]
        faults: dict[str, list[str]] = {}
        for task in tried:
            if fault := await self._fault(task):
                name, note = fault
                faults.setdefault(name, []).append(f"task '{task.id}': {note}")
        if tried and not faults:
            return [Finding("reward", "the reference earns more than a wrong answer")]
        found = []
        for name, notes in faults.items():
            value = f"wrong for {len(notes)} of {len(tried)} tasks"
            found.append(Finding(name, value, len(notes) < len(tried), notes[0], True))
        return found

    async def _fault(self, task: Task) -> tuple[str, str] | None:
        """What is wrong with the scores of a task's reference and of a wrong answer: which check
        fails, and why."""
        reference = task.reference[0]
        # As a whole tree, since rewards may compare the answers of a group.
        answers = [self._answering(one) for one in (reference, WRONG)]
        tree = self.setup.answered(task, answers)
        if tree is None:
            return "reference as answer", f"the format cannot write {reference!r:.80}"
        right, wrong = (await self.setup.scorer(tree)).leaves
        if right.is_correct is False:
            note = (
                f"'{reference:.60}' as the agent's answer was read as {right.answer!r:.60}; see"
                " format.answer and tasks.dataset.reference_after"
            )
            return "correctness", note
        # None if the function has failed, which `Parts.try_rewards` reports.
        if right.reward is None or wrong.reward is None or right.reward > wrong.reward:
            return None
        return "reward", (
            f"the reference earns no more than a wrong answer, {right.reward:g} and"
            f" {wrong.reward:g}, so nothing could be learned from answers; see how the function"
            " reads the answer"
        )


_ADVICE_UNTAUGHT = (
    "random weights write neither calls nor answers. Set warmup.num_steps, with an expert of the"
    " tasks or demonstrations in warmup.traces, or name a language model in model.path"
)
_ADVICE_UNKNOWN = (
    "the tiny model reads all of them as <unk>. Add them to the task source's vocabulary(), leave"
    ' them out (format.system_prompt = ""), or name a language model in model.path'
)


def _made_body(tool: Tool) -> str:
    """A body that fits a tool's signature: a text, or JSON with the required arguments."""
    signature = signature_of(tool)
    if signature.text_parameter is not None:
        return "1 + 1"
    return json.dumps(dict.fromkeys(signature.schema.get("required", ()), "..."))
