"""The markup of Search-R1 and Search-o1, for measuring their agents as they were made."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from treegraft import DataError, Origin, StepContent, Task
from treegraft.parts import Observation, ToolCall, interfaces, measuring

QUESTION = "{question}"
"""The place of the question in a prompt; without it the prompt precedes the question."""
TOOL = "search"
"""The one tool of these agents."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The markup of an agent."""

    call: tuple[str, str]
    """Around the query of a search."""
    result: tuple[str, str]
    """Before and after a result, line breaks included."""
    answer: tuple[str, str] | None
    """Around the answer; None where the whole last turn is one."""
    prompt: str
    """The question's turn where format.system_prompt names none."""


SEARCH_R1 = Marks(
    call=("<search>", "</search>"),
    result=("\n\n<information>", "</information>\n\n"),
    answer=("<answer>", "</answer>"),
    prompt="Answer the given question. You must conduct reasoning inside <think> and </think>"
    " first every time you get new information. After reasoning, if you find you lack some"
    " knowledge, you can call a search engine by <search> query </search> and it will return the"
    " top searched results between <information> and </information>. You can search as many times"
    " as your want. If you find no further external knowledge needed, you can directly provide the"
    " answer inside <answer> and </answer>, without detailed illustrations. For example,"
    " <answer> Beijing </answer>. Question: {question}\n",
)
"""Search-R1 (arXiv 2503.09516, table 1); its checkpoints have learned this very prompt."""
SEARCH_O1 = Marks(
    call=("<|begin_search_query|>", "<|end_search_query|>"),
    result=("\n\n<|begin_search_result|>", "<|end_search_result|>\n\n"),
    answer=None,
    prompt="You are a reasoning assistant with the ability to perform web searches to help you"
    " answer the user's question accurately. You have special tools:\n\n- To perform a search:"
    " write <|begin_search_query|> your query here <|end_search_query|>.\nThen, the system will"
    " search and analyze relevant web pages, then provide you with helpful information in the"
    " format <|begin_search_result|> ...search results... <|end_search_result|>.\n\nYou can repeat"
    " the search process multiple times if necessary.\n\nOnce you have all the information you"
    " need, continue your reasoning.\n\nPlease answer the following question. You should provide"
    " your final answer in the format \\boxed{YOUR_ANSWER}.\n\nQuestion:\n{question}\n\n",
)
"""Search-o1 (arXiv 2501.05366, appendix A), without its worked example and its number of
searches."""


@dataclass(frozen=True, slots=True)
class Read:
    """One step as it was read."""

    content: StepContent
    """The step's content; after a violation no more than its thought."""
    violation: str | None = None
    """Which rule it broke; None where it broke none."""

    @property
    def is_complete(self) -> bool:
        """Whether it is a whole call or answer."""
        return bool(self.content.calls) or self.content.answer is not None


class MarkedAgent:
    """Reads and writes the markup of an agent that nothing is trained with here.

    The first closed call or answer of a step counts, and what precedes it is the thought, with
    whatever tags the agent writes there. In a text from elsewhere each mark is broken by a space.
    """

    def __init__(
        self, tokenizer: interfaces.Tokenizer, marks: Marks, *, tools: Sequence[Any], **options: Any
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks
        self._prompt = marks.prompt
        if (given := options.get("system_prompt")) is not None:
            self._prompt = given
        self._rule = options.get("answer")
        self._max_context = options.get("max_context")
        ends = options.get("end_ids")
        # A model may have several ends, such as a chat's end of turn.
        found = [tokenizer.eos_token_id] if ends is None else ends
        self._end_ids = {one for one in found if one is not None}
        every = [marks.call, *([marks.answer] if marks.answer else [])]
        either = "|".join(f"{re.escape(one)}(.*?){re.escape(two)}" for one, two in every)
        self._action = re.compile(either, re.DOTALL)
        texts = [one.strip() for pair in (*every, marks.result) for one in pair]
        texts += filter(str.strip, getattr(tokenizer, "all_special_tokens", ()))
        # Else a page could close a result and go on as the agent.
        self._forged = re.compile("|".join(map(re.escape, texts)), re.IGNORECASE)
        self.stop: tuple[str, ...] = (marks.call[1],) if tools else ()
        self.final: tuple[str, ...] = (marks.answer[1],) if marks.answer else ()
        self.notes: tuple[str, ...] = ()

    def prompt_ids(self, task: Task) -> tuple[int, ...]:
        """Returns the tokens of one turn of the user, the prompt around the question, and of the
        opening of the agent's.

        Raises:
            DataError: more tokens than the model's context has.
        """
        question = self._broken(task.question)
        text = f"{self._prompt}{question}"
        if QUESTION in self._prompt:
            text = self._prompt.replace(QUESTION, question)
        # Base models have none, and read the prompt as it is.
        if self._tokenizer.chat_template:
            turn = [{"role": "user", "content": text}]
            text = self._tokenizer.apply_chat_template(
                turn, tokenize=False, add_generation_prompt=True
            )
        ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
        if self._max_context is not None and len(ids) > self._max_context:
            raise DataError(
                f"task '{task.id}': its prompt has {len(ids)} tokens, the limit is"
                f" {self._max_context}; drop the task, or take a model with a longer context.",
                code="prompt-too-long",
            )
        return ids

    def parse_step(self, token_ids: Sequence[int]) -> Read:
        """Returns the first closed call or answer of one step of the policy, and the thought before
        it; where there is neither and the agent has ended, its whole text is the answer or, in a
        markup with marks for it, a violation."""
        text = self.written_text(token_ids)
        has_ended = bool(token_ids) and token_ids[-1] in self._end_ids
        found = self._action.search(text)
        if found is None:
            if not has_ended:
                return Read(StepContent(thought=text.strip()))
            # Search-o1 has no marks for an answer: what ends is one.
            if self._marks.answer is None:
                return Read(StepContent(answer=text.strip()))
            return Read(StepContent(thought=text.strip()), "ended without a search or an answer")
        thought = text[: found.start()].strip()
        body = (found[found.lastindex or 1] or "").strip()
        if found[0].startswith(self._marks.call[0]):
            return Read(StepContent(thought=thought, calls=(ToolCall(TOOL, body),)))
        return Read(StepContent(thought=thought, answer=body))

    def answer_of(self, content: StepContent, task: Task) -> str | None:
        """Returns the answer that is compared with the task's reference, by format.answer; None if
        the step has none."""
        if content.answer is None or self._rule is None:
            return content.answer
        answer: str | None = self._rule.read(content.answer, task.reference)
        if answer is not None and self._rule.looks_for_box:
            found = measuring.boxed(answer)
            return found or ("" if self._rule.kind == "boxed" else answer)
        return answer

    def written_text(self, token_ids: Sequence[int]) -> str:
        """Returns the text of one step of the policy, without the end token."""
        ids = [one for one in token_ids if one not in self._end_ids]
        return self._tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def observation_ids(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Returns results between their marks as tokens."""
        opening, closing = self._marks.result
        ids: list[int] = []
        for one in observations:
            ids += self._tokenizer.encode(opening, add_special_tokens=False)
            ids += self._foreign_ids(one.text.strip())
            ids += self._tokenizer.encode(closing, add_special_tokens=False)
        return tuple(ids)

    def render_step(self, content: StepContent) -> tuple[interfaces.Span, ...]:
        """Returns a step as this agent would have written it, with the results that follow.

        Raises:
            ValueError: a call of another tool, several calls, or neither call nor answer.
        """
        thought = f"{content.thought.strip()}\n" if content.thought.strip() else ""
        if len(content.calls) == 1 and content.calls[0].name == TOOL:
            opening, closing = self._marks.call
            text = f"{thought}{opening} {content.calls[0].body.strip()} {closing}"
        elif content.answer is not None and not content.calls:
            opening, closing = self._marks.answer or ("\\boxed{", "}")
            text = f"{thought}{opening}{content.answer}{closing}"
        else:
            raise ValueError(f"a step has one call of '{TOOL}' or an answer; got neither alone.")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        if content.answer is not None and self._tokenizer.eos_token_id is not None:
            # Its end, as the agent itself writes it.
            ids = [*ids, self._tokenizer.eos_token_id]
        own: interfaces.Span = (tuple(ids), Origin.POLICY)
        if not content.observations:
            return (own,)
        return (own, (self.observation_ids(content.observations), Origin.TOOL))

    def render_graft(
        self, values: Sequence[str | StepContent], max_tokens: int | None = None
    ) -> tuple[int, ...]:
        """Returns texts and thoughts of another agent as tokens, without any mark: these agents
        have none for them."""
        texts = [one if isinstance(one, str) else one.thought for one in values]
        ids = self._foreign_ids("\n".join(texts))
        return tuple(ids if max_tokens is None else ids[max(0, len(ids) - max_tokens) :])

    def _broken(self, text: str) -> str:
        # Half a surrogate pair cannot be encoded as tokens.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        return self._forged.sub(lambda found: f"{found[0][0]} {found[0][1:]}", clean)

    def _foreign_ids(self, text: str) -> list[int]:
        broken = self._broken(text)
        return self._tokenizer.encode(broken, add_special_tokens=False, split_special_tokens=True)


def search_r1(tokenizer: Any, tools: Sequence[Any], **options: Any) -> MarkedAgent:
    """Returns the format "search-r1"."""
    return MarkedAgent(tokenizer, SEARCH_R1, tools=tools, **options)


def search_o1(tokenizer: Any, tools: Sequence[Any], **options: Any) -> MarkedAgent:
    """Returns the format "search-o1"."""
    return MarkedAgent(tokenizer, SEARCH_O1, tools=tools, **options)
