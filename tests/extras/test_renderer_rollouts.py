"""Trees that grow by templates of the package renderers: what the engine gets and the tree has."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import pytest
import transformers
from tests.extras.test_renderer_format import Anew
from tests.rollout.test_contexts import assert_law_5, context_ids
from tests.rollout.test_growth import branching
from tests.rollout.test_loop import leave
from tests.support.families import SHAPE
from tests.support.template_families import FAMILIES, end_ids_of, tokenizer_of

from treegraft.core.types import Completion, Origin, Status, Task, Tree
from treegraft.explore.independent import Independent
from treegraft.extras.formats.rendered import RendererFormat
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.policy.learn.sft import demonstration_tree
from treegraft.rollout.agents.grower import AgentGrower
from treegraft.rollout.agents.programs import FunctionProgram
from treegraft.rollout.formats.answers import AnswerRule
from treegraft.rollout.formats.turns import tool_schema
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.settings.policy import EngineSettings
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

TASK = Task(id="t/1", question="6 * 7 ?", reference=("42",))


async def multiply(a: int, b: int) -> str:
    """Multiplies two numbers.

    Args:
        a: the first
        b: the second
    """
    return f"{a} * {b} = {a * b}"


TOOL = FunctionTool(multiply)


def form_of(name: str, **more: Any) -> RendererFormat:
    return RendererFormat(
        tokenizer_of(name),
        [TOOL],
        template_options=FAMILIES[name].options,
        system_prompt="Be brief.",
        require_think=False,
        require_boxed=False,
        answer=AnswerRule("whole"),
        end_ids=end_ids_of(name),
        **more,
    )


def limits(**changed: Any) -> Limits:
    values: dict[str, Any] = {
        "num_leaves": 2,
        "temperature": 1.0,
        "max_completion_tokens": 400,
        "max_agent_steps": 6,
        "max_tool_calls": 6,
        "deadline_s": 60.0,
    }
    return Limits(**{**values, **changed})


def grown(engine: Any, form: Any, explorer: Any = None, **changed: Any) -> Tree:
    settings = ToolsSettings(deadline_s=5.0, max_output_chars=200, cache=False, max_concurrent=8)
    grower = Grower(
        engine, form, Toolbox([TOOL], settings), explorer or Independent(), limits(**changed), leave
    )
    return asyncio.run(grower.grow(TASK, noise_key=(0, "train", 4), group_id="4/t/0"))


def turn_ids(form: RendererFormat, pairs: Any, thought: str = "I compute.") -> list[int]:
    """A turn with calls, or with an answer for no pairs."""
    from treegraft.core.types import StepContent, ToolCall

    calls = tuple(ToolCall("multiply", json.dumps({"a": a, "b": b})) for a, b in pairs)
    content = StepContent(thought=thought, calls=calls, answer=None if calls else "42")
    return list(form.render_step(content)[0][0])


def expected(name: str, form: RendererFormat, tree: Tree, step_id: str) -> list[int]:
    """The context of a step by the family's own template, from the contents of the steps above."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": TASK.question},
    ]
    by_id = {step.id: step for step in tree.steps}

    for one in [step_id[:n] for n, letter in enumerate(step_id) if letter == "."][1:]:
        step = by_id[one]
        if step.is_context:
            continue
        calls = [
            {
                "id": f"call{n}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.body)},
            }
            for n, call in enumerate(step.content.calls)
        ]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        if step.content.thought:
            message["reasoning_content"] = step.content.thought
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "name": "multiply", "content": seen.text}
            for call, seen in zip(calls, step.content.observations, strict=True)
        ]

    tokenizer = tokenizer_of(name)
    text = tokenizer.apply_chat_template(
        messages,
        tools=[tool_schema(TOOL)],
        tokenize=False,
        add_generation_prompt=True,
        **FAMILIES[name].options,
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


def assert_contexts(name: str, form: RendererFormat, tree: Tree, engine: Any) -> None:
    assert_law_5(tree, engine)
    for step in tree.steps:
        if step.num_sampled:
            assert context_ids(tree, step.parent) == expected(name, form, tree, step.id), step.id


class HalfScripted(ScriptedEngine):
    """The first two steps of a path come from a script, later ones from a tiny random model."""

    def __init__(self, native: NativeEngine, turns: list[list[int]], tokenizer: Any) -> None:
        super().__init__(lambda text: turns[text.count(" = ")], tokenizer)
        self._native = native
        self._num_turns = len(turns)

    async def complete(self, request: Any) -> Completion:
        text = self._tokenizer.decode(list(request.prefix_ids))
        if text.count(" = ") < self._num_turns:
            return await super().complete(request)
        self.calls.append(request)
        return await self._native.complete(request)

    async def close(self) -> None:
        await self._native.close()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", ["qwen3_5_think", "gemma4_v5"])
def test_a_tree_of_a_tiny_model(name: str) -> None:
    """Two steps with calls, the first with two at once where the family has that; then a random
    model goes on until its tokens are used up."""
    tokenizer = tokenizer_of(name)
    form = form_of(name)
    config = transformers.Qwen3Config(
        **{**SHAPE, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    turns = [turn_ids(form, [(6, 7)]), turn_ids(form, [(1, 2)], thought="Again.")]
    native = EngineSettings(max_rows=8, deadline_s=60.0, native={"cache_gb": 0.1})
    engine = HalfScripted(NativeEngine(model, tokenizer, native), turns, tokenizer)
    tree = grown(engine, form, branching(), num_leaves=4)
    asyncio.run(engine.close())
    assert_contexts(name, form, tree, engine)
    assert len(tree.leaves) == 4 and all(leaf.status is not Status.FAILED for leaf in tree.leaves)
    assert any(step.num_sampled and step.depth == 3 for step in tree.steps)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rollout_of_each_family(name: str) -> None:
    form = form_of(name)
    thought = "I compute." if FAMILIES[name].has_thoughts else ""
    several = [(6, 7), (3, 4)][: 2 if FAMILIES[name].has_several else 1]
    script = [
        turn_ids(form, several, thought),
        turn_ids(form, [(5, 5)], thought),
        turn_ids(form, [], thought),
    ]
    engine = ScriptedEngine(list(script), tokenizer_of(name))
    tree = grown(engine, form, num_leaves=1)
    assert_contexts(name, form, tree, engine)
    assert tree.leaves[0].status is Status.COMPLETED and tree.leaves[0].answer == "42"
    assert [len(step.content.observations) for step in tree.steps[1:]] == [len(several), 1, 0]
    # Nothing was written anew: the tree is one path, and demonstrations have the same tokens.
    assert not any(step.is_context for step in tree.steps)
    contents = [step.content for step in tree.steps[1:]]
    shown = demonstration_tree(form, TASK, contents)
    assert [step.token_ids.tolist() for step in shown.steps] == [
        step.token_ids.tolist() for step in tree.steps
    ]


def test_a_context_that_does_not_continue_the_turn_is_a_step_of_its_own() -> None:
    """The policy writes a call without the spaces that the template has, and the renderer writes
    every context as a whole."""
    name = "qwen3"
    form = copy.copy(form_of(name))
    form._renderer = Anew(form._renderer)
    tokenizer = tokenizer_of(name)
    call = '<tool_call>\n{"name":"multiply","arguments":{"a":6,"b":7}}\n</tool_call><|im_end|>'
    own = tokenizer.encode(f"<think>\nx\n</think>\n\n{call}", add_special_tokens=False)
    engine = ScriptedEngine([own, own, turn_ids(form, [])], tokenizer)
    tree = grown(engine, form, num_leaves=1)
    assert_contexts(name, form, tree, engine)
    shape = [(step.id, step.parent, step.is_context) for step in tree.steps]
    assert shape == [
        ("0", None, False),
        ("0.0", "0", False),
        ("0.0.0", "0", True),
        ("0.0.0.0", "0.0.0", False),
        ("0.0.0.0.0", "0.0.0", True),
        ("0.0.0.0.0.0", "0.0.0.0.0", False),
    ]
    anew = tree.steps[2]
    assert not anew.loss_mask.any() and set(anew.origins.tolist()) == {int(Origin.CONTEXT)}


def test_a_context_that_begins_otherwise_is_a_root_of_its_own() -> None:
    name = "qwen3"

    class Shorter(RendererFormat):
        def context_ids(self, *given: Any) -> tuple[int, ...]:
            return super().context_ids(*given)[1:]

    form = form_of(name)
    form.__class__ = Shorter
    engine = ScriptedEngine([turn_ids(form, [(6, 7)]), turn_ids(form, [])], tokenizer_of(name))
    tree = grown(engine, form, num_leaves=1)
    assert_law_5(tree, engine)
    assert [(step.id, step.parent) for step in tree.steps] == [
        ("0", None),
        ("0.0", "0"),
        ("0.0.0", None),
        ("0.0.0.0", "0.0.0"),
    ]
    assert tree.leaves[0].status is Status.COMPLETED


def test_an_agent_that_owns_its_loop() -> None:
    """Its requests are written and its replies read by the renderer; a second question drops the
    thoughts of the first, so that the context behind it is one of its own."""
    name = "qwen3_5_think"
    form = form_of(name)
    script = [turn_ids(form, [(6, 7)]), turn_ids(form, []), turn_ids(form, [])]
    engine = ScriptedEngine(list(script), tokenizer_of(name))
    sent: list[list[dict[str, Any]]] = []

    async def agent(task: Task, client: Any) -> str | None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.question}]

        async def ask() -> Any:
            sent.append(copy.deepcopy(messages))
            schema = tool_schema(TOOL)
            reply = await client.chat.completions.create(
                model="policy", messages=messages, tools=[schema]
            )
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            return reply.choices[0].message

        said = await ask()
        call = said.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "multiply",
            {"a": 6, "b": 7},
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        await ask()
        messages.append({"role": "user", "content": "Sure ?"})
        return str((await ask()).content)

    grower = AgentGrower(
        engine,
        form,
        None,
        Independent(),
        limits(num_leaves=1, max_completion_tokens=2000),
        leave,
        program=FunctionProgram(agent),
        temperature=1.0,
    )
    (tree,) = asyncio.run(
        grower.grow_all([TASK], noise_key=(0,), group_prefix="1", max_live_trees=1)
    )
    assert tree.leaves[0].status is Status.COMPLETED, tree.leaves[0].error
    contexts = [list(one.prefix_ids) for one in engine.calls]
    tokenizer = tokenizer_of(name)
    for context, messages in zip(contexts, sent, strict=True):
        for message in messages:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        text = tokenizer.apply_chat_template(
            messages, tools=[tool_schema(TOOL)], tokenize=False, add_generation_prompt=True
        )
        assert context == tokenizer.encode(text, add_special_tokens=False)
    assert contexts[1][: len(contexts[0])] == contexts[0]
    assert "I compute." not in tokenizer.decode(contexts[2])
    assert sum(step.is_context for step in tree.steps) == 2
