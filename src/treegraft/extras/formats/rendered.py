"""Chat templates by the package renderers, such as those whose calls are no JSON in marks.

A model's own template decides which renderer it gets: the one that writes a conversation of five
questions as the template does, token for token.
"""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product, repeat, takewhile
from typing import Any

from treegraft import Origin, StepContent, Task
from treegraft.parts import Observation, agents, errors, interfaces

OWN_NAME = "renderer"
"""The key of format.template_options that names a renderer."""
# The first three render by templates or code of others; the last one downloads a vocabulary.
_LEFT_OUT = ("auto", "default", "custom", "gpt-oss")
_TASK = Task(id="?", question="?", reference=())
(_ASKED,) = _TASK.conversation()
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
        **options: Any,
    ) -> None:
        """Takes the shared options and variables of the template.

        Raises `SettingError` for a template that no renderer writes, and for grafts.
        """
        super().__init__(tokenizer, tools, template_options, **options)
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
        self._shown_schemas: list[Message] | None = None
        self._learn_marks()
        # None for none: templates may have a heading for an empty list.
        self._shown_schemas = self._described(self._schemas) or None
        self._choose()
        # So that the same one is taken for other tools.
        self._template_options = {**self._options, OWN_NAME: self._name}
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

    def _template_ids(self, messages: list[Message]) -> list[int]:
        """The tokens of the model's own template."""
        text = self._tokenizer.apply_chat_template(
            messages,
            tools=self._shown_schemas,
            tokenize=False,
            add_generation_prompt=True,
            **self._options,
        )
        return self._encode(text)

    def _contexts(
        self, write: Callable[[list[Message]], list[int]], probe: list[Message]
    ) -> list[int] | str:
        """The tokens of all contexts of a probe, one behind the other, or why one of them cannot be
        written."""
        ids = []
        try:
            for place, message in enumerate(probe):
                if message["role"] == "assistant":
                    ids += write(probe[:place])
        except Exception as error:  # templates and renderers are programs of others
            return f"refuses a conversation: {error}"
        return ids

    def _learn_marks(self) -> None:
        marks = set(self._tokenizer.get_added_vocab())
        found = self._contexts(self._template_ids, self._probe(has_several=False))
        if not isinstance(found, str):
            marks.update(agents.MARK.findall(self._decode(found)))
        self._set_marks(marks)

    def _choose(self) -> None:
        """Takes the renderer that writes what the template does, with as much in a turn as that
        allows. Raises SettingError if there is none."""
        from renderers.base import create_renderer
        from renderers.configs import RendererConfig

        candidates = {}
        reason = "no renderer with these template_options writes the model's chat template"
        for kind in typing.get_args(typing.get_args(RendererConfig)[0]):
            name = kind.model_fields["name"].default
            if name in _LEFT_OUT or self._name not in (None, name):
                continue
            try:
                candidates[name] = create_renderer(self._tokenizer, kind(**self._options))
            except Exception as error:  # the tokenizer lacks a token, or it knows no such option
                if self._name:
                    reason = f"the renderer '{name}' cannot be made: {error}"
        for self._has_several, self._has_text in product((True, False), repeat=2):
            probe = self._probe(has_several=self._has_several, has_text=self._has_text)
            wanted = self._contexts(self._template_ids, probe)
            if isinstance(wanted, str):
                reason = f"the model's chat template {wanted}"
                continue
            for name, self._renderer in candidates.items():
                found = self._contexts(self._ids, probe)
                if found == wanted:
                    self._name = name
                    return
                if self._name:
                    reason = f"the renderer '{name}' {self._difference(found, wanted)}"
        raise _refused(reason)

    def _difference(self, found: list[int] | str, wanted: list[int]) -> str:
        """Where a renderer leaves the template."""
        if isinstance(found, str):
            return found
        pairs = zip(found, wanted, strict=False)
        count = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        place = slice(max(0, count - 8), count + 12)
        return (
            f"writes {self._decode(found[place])!r}, the model's chat template"
            f" {self._decode(wanted[place])!r}"
        )

    def _learn_turns(self) -> None:
        """Fixes which marks are a thought's. Raises SettingError for turns without an end."""
        turns = [one for one in self._probe(has_several=False) if one["role"] == "assistant"][:2]
        # Without thoughts a prompt may hold an empty one, behind which none can be written.
        reason = ""
        for self._dummy in ("a", ""):
            try:
                *_, answer = [
                    self._turn_ids({**one, "reasoning_content": self._dummy}) for one in turns
                ]
                break
            except ValueError as error:
                reason = reason or str(error)
        else:
            raise _refused(reason)
        self._thought_marks = Counter(self._marks(answer)[0])

    # Rendering

    def _ids(self, messages: Sequence[Message], *, opens: bool = True) -> list[int]:
        return list(
            self._renderer.render_ids(
                messages, tools=self._shown_schemas, add_generation_prompt=opens
            )
        )

    def _written(self, messages: Sequence[Message]) -> str:
        return self._decode(self._ids(messages))

    def _turn_ids(self, message: Message) -> list[int]:
        """A turn as the agent samples it, its end token included. Raises ValueError for one that
        cannot be written behind its prompt or has no end."""
        # What follows calls belongs to the turn in templates that end it by the next one's mark.
        whole = self._ids([_ASKED, message, *_results(message, repeat("?"))], opens=False)
        if whole[: len(self._opening)] != self._opening:
            raise ValueError("the renderer does not write this turn behind its prompt")
        turn = whole[len(self._opening) :]
        for place, token in enumerate(turn):
            if token in self._end_ids:
                return turn[: place + 1]
        if not _called(message) and self._tokenizer.eos_token_id is not None:
            return [*turn, self._tokenizer.eos_token_id]
        ends = self._decode(sorted(self._end_ids))
        raise ValueError(
            f"the agent's turn {self._decode(turn)[:200]!r} holds none of the tokens that end a"
            f" completion ({ends}); add its end to eos_token_id of the model's generation config"
        )

    def context_ids(
        self, task: Task, turns: Sequence[Turn], before: Sequence[int]
    ) -> tuple[int, ...]:
        """Returns the tokens of the next step's context; see `Conversing`."""

        def render(safe: Callable[[str], str]) -> list[int]:
            messages = [*map(self._harmless, self._messages(task))]
            for number, (ids, content) in enumerate(turns):
                # Of a stored step its content is all there is.
                said = self._read(ids, number) if ids else self._message(content, number)
                results = _results(said, [safe(one.text) for one in content.observations])
                messages += [self._harmless(said), *results]
            bridged = self._renderer.bridge_to_next_turn(
                [*before], [*ids], results, tools=self._shown_schemas
            )
            return self._ids(messages) if bridged is None else [*bridged.token_ids]

        return tuple(self._harmless_ids(render))

    def _message(self, content: StepContent, number: int) -> Message:
        """The message of a content. Raises ValueError for one that cannot be said."""
        said = "" if content.answer is None else self._answer_text(content.answer)
        calls = [*map(self._arguments, content.calls)]
        return agents.message_of(said, content.thought.strip(), calls, number)

    def _step_ids(self, content: StepContent) -> list[int]:
        return self._turn_ids(self._harmless(self._message(content, 0)))

    def _spans(
        self, ids: Sequence[int], seen: Sequence[Observation]
    ) -> tuple[interfaces.Span, ...]:
        own: interfaces.Span = (tuple(ids), Origin.POLICY)
        if not seen:
            return (own,)
        whole = (*self._opening, *ids)
        turn = (ids, StepContent(observations=tuple(seen)))
        context = self.context_ids(_TASK, [turn], self._opening)
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
                [*token_ids], tools=self._shown_schemas, prompt_ids=self._opening
            )
        except Exception as error:  # it reads what a policy may write
            raise agents.Violation(f"a turn that cannot be read: {error}") from error
        if read.reasoning_complete is False and token_ids[-1] in self._end_ids:
            raise agents.Violation("a thought that is not closed")
        calls = []
        for call in read.tool_calls:
            # Values that are not of their type are the tool's to refuse.
            is_readable = call.status in ("ok", "invalid_json")
            if not is_readable or not isinstance(call.arguments, dict):
                raise agents.Violation(f"a tool call that cannot be read ({call.status})")
            calls.append((call.name, self._typed(call.name, call.arguments)))
        return agents.message_of(
            read.content, (read.reasoning_content or "").strip(), calls, number
        )

    def _typed(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments with booleans for the words of Python that some templates write."""
        typed = dict(arguments)
        if signature := self._signatures.get(name):
            for key, kind in signature.schema.get("properties", {}).items():
                if typed.get(key) in ("True", "False") and kind.get("type") == "boolean":
                    typed[key] = typed[key] == "True"
        return typed

    def parse_step(self, token_ids: Sequence[int]) -> agents.ParsedStep:
        """Returns the content of one turn, a thought and calls or an answer, or which rule it
        broke. A turn that ran out of tokens breaks no rule; `is_complete` is False for it."""
        thought = ""
        try:
            message = self._read(token_ids, 0)
            thought = message.get("reasoning_content", "")
            ids, has_ended = self._before_end(token_ids)
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

    def _said(self, token_ids: Sequence[int]) -> tuple[str, str]:
        message = self._read(token_ids, 0)
        return message.get("reasoning_content", ""), message["content"]


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
