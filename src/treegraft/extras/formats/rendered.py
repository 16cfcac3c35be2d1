"""Chat templates by the package renderers, such as those whose calls are no JSON in marks.

A model's own template decides which renderer it gets: the one that writes a conversation of five
questions as the template does, token for token.
"""

from __future__ import annotations

import re
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, product, takewhile
from typing import Any, Unpack

from treegraft import Origin, StepContent, Task
from treegraft.parts import Observation, agents, errors, interfaces, packages

OWN_NAME = "renderer"
"""The key of format.template_options that names a renderer."""
# The first three render by templates or code of others; the last one downloads a vocabulary.
_LEFT_OUT = ("auto", "default", "custom", "gpt-oss")
_ASKED = {"role": "user", "content": "?"}
Message = dict[str, Any]
Turn = tuple[Sequence[int], StepContent]


class RendererFormat(agents.TurnFormat):
    """Steps as a renderer writes and reads them. The context of each step is what it writes of the
    whole conversation; tokens that were read or sampled stay where that continues them."""

    stop: tuple[str, ...] = ()
    final: tuple[str, ...] = ()

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[interfaces.Tool],
        *,
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[agents.FormatOptions],
    ) -> None:
        """Takes the shared options and variables of the template.

        Raises `SettingError` for a template that no renderer writes, and for grafts.
        """
        packages.require("format.kind = 'renderer'", "renderers")
        super().__init__(tokenizer, tools, **options)
        self._tokenizer: Any = tokenizer
        if options.get("mentions_retrieval"):
            raise _refused("explore.explorers has 'graft', and a renderer has no place for grafts")
        if self._thoughts != "auto":
            raise _refused(
                f"format.thoughts is '{self._thoughts}', and here the template says whether they"
                " stay; leave it out and set the template's variable by format.template_options"
            )
        if not tokenizer.chat_template:
            raise _refused("the model's tokenizer has no chat template to compare with")
        self._options = dict(template_options or {})
        self._name = self._options.pop(OWN_NAME, None)
        self._schemas = [agents.tool_schema(tool) for tool in tools]
        self._learn_marks()
        self._schemas = self._described(self._schemas)
        self._renderer = self._chosen()
        self._opening = self._ids([_ASKED])
        self._learn_turns()

    # Finding out

    def _probe(self, *, has_several: bool = True, has_text: bool = True) -> list[Message]:
        """A conversation of five questions, with calls if there are tools."""
        names = [schema["function"]["name"] for schema in self._schemas]
        arguments = {"a": "b c", "n": 1.5, "yes": True, "all": [1, {"k": "v"}]}
        calls = [(name, arguments) for name in (*names, *names)[: 2 if has_several else 1]]
        messages: list[Message] = [{"role": "system", "content": "Be brief."}]
        for number in range(5):
            thought = f"thought {number}" if number != 1 else ""
            messages.append({"role": "user", "content": f"question {number}"})
            if names:
                # Texts that become one token where nothing stands between them.
                said = "so" if has_text and number != 2 else ""
                messages.append(agents.message_of(said, thought, calls, number))
                messages += _results(messages[-1], ["42", "so it is"])
            messages.append(agents.message_of(f"me {number}", thought, (), number))
        return messages

    def _template_ids(self, messages: list[Message], *, opens: bool = True) -> list[int]:
        """The tokens of the model's own template."""
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=self._schemas or None,
            tokenize=False,
            add_generation_prompt=opens,
            **self._options,
        )
        return self._encode(text)

    def _learn_marks(self) -> None:
        added = set(self._tokenizer.get_added_vocab())
        marks = added.copy()
        for has_several in (True, False):
            try:
                text = self._decode(self._template_ids(self._probe(has_several=has_several)))
            except Exception:  # a template may refuse several calls
                continue
            marks |= set(agents.MARK.findall(text))
        special = {*self._tokenizer.all_special_tokens, *map(self._text, self._end_ids)}
        self._specials = agents.Specials(self._tokenizer, sorted(marks - special), self._end_ids)
        longest_first = sorted(filter(str.strip, marks), key=len, reverse=True)
        self._mark = re.compile("|".join(map(re.escape, longest_first)))
        self._forged = agents.loosely(longest_first)

    def _text(self, token: int) -> str:
        return self._decode([token])

    def _chosen(self) -> Any:
        """The renderer that writes what the template does, with as much in a turn as that allows.
        Raises SettingError if there is none."""
        candidates = self._candidates()
        reason = ""
        for has_several, has_text in product((True, False), repeat=2):
            probe = self._probe(has_several=has_several, has_text=has_text)
            contexts = [probe[:n] for n, one in enumerate(probe) if one["role"] == "assistant"]
            try:
                wanted = [self._template_ids(one) for one in contexts]
            except Exception as error:  # a template is a program of the model's makers
                reason = reason or f"the model's chat template refuses a conversation: {error}"
                continue
            found = {}
            for name, self._renderer in candidates.items():
                found[name] = [self._ids(one) for one in contexts]
                if found[name] == wanted:
                    self._has_several = has_several
                    self._has_text = has_text
                    self._name = name
                    return self._renderer
            reason = self._difference(found, wanted)
        raise _refused(reason)

    def _candidates(self) -> dict[str, Any]:
        """The renderers that this tokenizer and these options allow, by name. Raises SettingError
        if there is none."""
        from renderers.base import create_renderer
        from renderers.configs import RendererConfig

        made = {}
        reason = f"the package has no renderer '{self._name}'"
        for kind in typing.get_args(typing.get_args(RendererConfig)[0]):
            name = kind.model_fields["name"].default
            if name in _LEFT_OUT or self._name not in (None, name):
                continue
            try:
                made[name] = create_renderer(self._tokenizer, kind(**self._options))
            except Exception as error:  # the tokenizer lacks a token, or it knows no such option
                reason = f"the renderer '{name}' cannot be made: {error}"
        if not made:
            raise _refused(reason)
        return made

    def _difference(
        self, found: Mapping[str, Sequence[list[int]]], wanted: Sequence[list[int]]
    ) -> str:
        """Where the renderer that comes nearest leaves the template."""
        whole = list(chain(*wanted))

        def num_same(name: str) -> int:
            pairs = zip(chain(*found[name]), whole, strict=False)
            return len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))

        name = max(found, key=num_same)
        place = slice(max(0, num_same(name) - 8), num_same(name) + 12)
        ours = self._decode(list(chain(*found[name]))[place])
        theirs = self._decode(whole[place])
        return (
            "no renderer writes what the model's chat template does; the nearest,"
            f" '{name}', writes {ours!r}, the template {theirs!r}"
        )

    def _learn_turns(self) -> None:
        """Fixes which marks are the agent's. Raises SettingError for turns without an end."""
        # Some renderers end a turn without a thought otherwise than the prompt begins it.
        self._dummy = "a"
        calls = [_called(message) for message in self._probe() if "tool_calls" in message][:1]
        try:
            self._turn_ids(agents.message_of("b", "a", (), 0))
        except ValueError:
            self._dummy = ""
        try:
            answer = self._turn_ids(agents.message_of("b", self._dummy, (), 0))
            turns = [
                self._turn_ids(agents.message_of("", self._dummy, one[:1], 0)) for one in calls
            ]
        except ValueError as error:
            raise _refused(str(error)) from error
        self._thought_marks = Counter(self._marks(answer)[0])
        self._own_ids = set(chain(answer, *turns))

    # Rendering

    def _ids(self, messages: Sequence[Message], *, opens: bool = True) -> list[int]:
        found: list[int] = self._renderer.render_ids(
            messages, tools=self._schemas or None, add_generation_prompt=opens
        )
        return found

    def _asked_ids(self, task: Task) -> list[int]:
        return self._ids(self._messages(task))

    def _turn_ids(self, message: Message) -> list[int]:
        """A turn as the agent samples it, its end token included. Raises ValueError for one that
        cannot be written behind its prompt or has no end."""
        # What follows calls belongs to the turn in templates that end it by the next one's mark.
        whole = self._ids(
            [_ASKED, message, *_results(message, ["?"] * len(_called(message)))], opens=False
        )
        if whole[: len(self._opening)] != self._opening:
            raise ValueError("the renderer does not write this turn behind its prompt")
        turn = whole[len(self._opening) :]
        for place, token in enumerate(turn):
            if token in self._end_ids:
                return turn[: place + 1]
        if not _called(message) and self._tokenizer.eos_token_id is not None:
            return [*turn, self._tokenizer.eos_token_id]
        ends = ", ".join(map(repr, map(self._text, sorted(self._end_ids))))
        raise ValueError(
            f"the agent's turn {self._decode(turn)[:200]!r} holds none of the tokens that end a"
            f" completion ({ends}); add its end to eos_token_id of the model's generation config"
        )

    def context_ids(
        self, task: Task, turns: Sequence[Turn], before: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the tokens of the next step's context; see `Conversing`."""
        return self._continued_by(self._messages(task), turns, before)

    def _continued_by(
        self, asked: Sequence[Message], turns: Sequence[Turn], before: Sequence[int]
    ) -> tuple[int, ...]:
        messages = [
            self._harmless(self._read(ids, n) if ids else self._message(content, n))
            for n, (ids, content) in enumerate(turns)
        ]
        own = turns[-1][0]

        def render(safe: Callable[[str], str]) -> list[int]:
            results = [
                _results(message, [safe(one.text) for one in content.observations])
                for message, (_, content) in zip(messages, turns, strict=True)
            ]
            bridged = self._renderer.bridge_to_next_turn(
                [*before], [*own], results[-1], tools=self._schemas or None
            )
            if bridged is not None:
                return list(bridged.token_ids)
            said = chain(*([one, *seen] for one, seen in zip(messages, results, strict=True)))
            return self._ids([*map(self._harmless, asked), *said])

        return tuple(self._harmless_ids(render))

    def _message(self, content: StepContent, number: int) -> Message:
        """The message of a content. Raises ValueError for one that cannot be said."""
        self._check_one_action(content)
        said = "" if content.answer is None else self._answer_text(content.answer)
        calls = [*map(self._arguments, content.calls)]
        return agents.message_of(said, content.thought.strip(), calls, number)

    def render_step(self, content: StepContent) -> tuple[interfaces.Span, ...]:
        """Returns the turn's policy tokens, end token included, then its results as tool tokens.

        Raises `ValueError` for a content that the renderer cannot say or would read otherwise.
        """
        ids = self._turn_ids(self._harmless(self._message(content, 0)))
        self._check_read_back(ids, content)
        own: interfaces.Span = (tuple(ids), Origin.POLICY)
        if not content.observations:
            return (own,)
        whole = (*self._opening, *ids)
        context = self._continued_by([_ASKED], [(ids, content)], self._opening)
        if context[: len(whole)] != whole:
            raise ValueError("the renderer writes this turn otherwise once results follow.")
        return own, (context[len(whole) :], Origin.TOOL)

    def observation_ids(self, observations: Sequence[Observation]) -> tuple[int, ...]:
        """Raises NotImplementedError: results depend on their calls; see `context_ids`."""
        raise NotImplementedError("a renderer writes results by context_ids")

    def _graft_ids(self, values: Sequence[str | StepContent]) -> list[int]:
        raise _refused("a renderer has no place for grafts")

    # Reading

    def _read(self, token_ids: Sequence[int], number: int) -> Message:
        """A turn as a message. Raises Violation for one that cannot be read."""
        try:
            read = self._renderer.parse_response(
                [*token_ids], tools=self._schemas or None, prompt_ids=self._opening
            )
        except Exception as error:  # it reads what a policy may write
            raise agents.Violation(f"a turn that cannot be read: {error}") from error
        if read.reasoning_complete is False and token_ids[-1] in self._end_ids:
            raise agents.Violation("a thought that is not closed")
        calls = []
        for call in read.tool_calls:
            # Values that are not of their type are the tool's to refuse.
            is_typed = call.status != "invalid_json" or not isinstance(call.arguments, dict)
            if call.status != "ok" and is_typed:
                raise agents.Violation(f"a tool call that cannot be read ({call.status})")
            calls.append((call.name, self._typed(call.name, call.arguments)))
        return agents.message_of(
            read.content, (read.reasoning_content or "").strip(), calls, number
        )

    def _typed(self, name: str, arguments: Any) -> Any:
        """The arguments with booleans for the words of Python that some templates write."""
        signature = self._signatures.get(name)
        if signature is None or not isinstance(arguments, dict):
            return arguments
        kinds = signature.schema.get("properties", {})
        return {
            key: value == "True"
            if value in ("True", "False") and kinds.get(key, {}).get("type") == "boolean"
            else value
            for key, value in arguments.items()
        }

    def parse_step(self, token_ids: Sequence[int]) -> agents.ParsedStep:
        """Returns the content of one turn, a thought and calls or an answer, or which rule it
        broke. A turn that ran out of tokens breaks no rule; `is_complete` is False for it."""
        thought = ""
        try:
            message = self._read(token_ids, 0)
            thought = message.get("reasoning_content", "")
            ids, has_ended = self._before_end(token_ids)
            if {*self._marks(ids)[0]} - self._own_ids:
                raise agents.Violation("a special token inside the turn")
            if not has_ended:
                return agents.ParsedStep(StepContent(thought=thought), None)
            self._check_marks(message, ids)
            return agents.ParsedStep(self._content(message), None)
        except (agents.Violation, ValueError) as violation:
            return agents.ParsedStep(StepContent(thought=thought), str(violation))

    def _check_marks(self, message: Message, ids: Sequence[int]) -> None:
        """Raises Violation for marks that the turn would not have if the renderer wrote it."""
        whole = {**message, "reasoning_content": message.get("reasoning_content") or self._dummy}
        # Of texts without marks, so that all of them are the renderer's own.
        canonical = self._before_end(self._turn_ids(self._described(whole)))[0]
        found = self._marks(ids)[0]
        thoughts = [token for token in found if token in self._thought_marks]
        if not Counter(thoughts) <= self._thought_marks:
            raise agents.Violation("a second thought")
        rest = [
            [token for token in one if token not in self._thought_marks]
            for one in (found, self._marks(canonical)[0])
        ]
        if rest[0] != rest[1]:
            raise agents.Violation("marks out of place")

    def _content(self, message: Message) -> StepContent:
        thought = message.get("reasoning_content", "")
        if self._require_think and not thought:
            raise agents.Violation("no thought")
        said = message["content"]
        if called := _called(message):
            if len(called) > 1 and not self._has_several:
                raise agents.Violation("a second tool call in one turn")
            if said.strip() and not self._has_text:
                raise agents.Violation("text before a tool call, which the template has otherwise")
            calls = [self.read_call({"name": name, "arguments": found}) for name, found in called]
            return StepContent(thought=_joined(thought, said), calls=tuple(calls))
        if not said.strip():
            raise agents.Violation("ended without a tool call or an answer")
        before, answer = self.split_answer(said)
        return StepContent(thought=_joined(thought, before), answer=answer)

    # Conversations of programs that write their own prompts

    def with_tools(self, schemas: Sequence[Mapping[str, Any]]) -> RendererFormat:
        """Returns the format of `Serving` for other tools. Raises `SettingError` for tools that the
        renderer writes otherwise than the template."""
        return RendererFormat(
            self._tokenizer,
            [agents.described_tool(**schema["function"]) for schema in schemas],
            template_options={**self._options, OWN_NAME: self._name},
            system_prompt="",
            require_think=False,
            require_boxed=False,
            answer=agents.AnswerRule("whole"),
            end_ids=sorted(self._end_ids),
        )

    def conversation_ids(
        self, messages: Sequence[Mapping[str, Any]], earlier: Iterable[tuple[str, Sequence[int]]]
    ) -> list[int]:
        """Returns the tokens of a conversation, as `Serving` says."""
        ids = self._ids([self._harmless(one) for one in messages])
        text = self._decode(ids)
        fitting = [one for one in earlier if text.startswith(one[0])]
        before, known = max(fitting, key=lambda one: len(one[0]), default=("", ()))
        count = agents.shortest_prefix(self._decode, ids, before)
        return [*known, *ids[count:]] if self._decode(ids[:count]) == before else ids

    def message(self, token_ids: Sequence[int], number: int) -> tuple[Message, str | None]:
        """Returns a turn as a message and which rule it broke, as `Serving` says."""
        parsed = self.parse_step(token_ids)
        if parsed.violation is not None:
            text = self.written_text(token_ids)
            return agents.message_of(text, "", (), number), parsed.violation
        read = self._read(token_ids, number)
        calls = [(call.name, call.body) for call in parsed.content.calls]
        said = read["content"] or (None if calls else "")
        return agents.message_of(said, read.get("reasoning_content", ""), calls, number), None


def _called(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The names and arguments of a message's calls."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    return [(function["name"], function["arguments"]) for function in functions]


def _results(message: Mapping[str, Any], texts: Iterable[str]) -> list[Message]:
    """The messages of results of a message's calls, as many as there are of both."""
    return [
        {
            "role": "tool",
            "tool_call_id": call["id"],
            "name": call["function"]["name"],
            "content": text,
        }
        for call, text in zip(message.get("tool_calls", ()), texts, strict=False)
    ]


def _joined(thought: str, text: str) -> str:
    return "\n".join(filter(None, (thought, text.strip())))


def _refused(reason: str) -> errors.SettingError:
    return errors.SettingError(
        f"format.kind is 'renderer', but {reason}. Expected a model whose chat template a renderer"
        " writes token for token. Name the renderer by format.template_options.renderer to see"
        " where it differs, or set format.kind = 'chat' or 'tags'.",
        code="renderer-refused",
    )
