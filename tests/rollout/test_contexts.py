"""Thoughts that later steps do not see: what the engine is given, what the tree records, where it
branches and grafts."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.test_format_chat import TASK, TOOLS, tokenizer_of
from tests.rollout.test_growth import OneTrace, branching
from tests.rollout.test_loop import TASKS, leave, search
from tests.support.chat_templates import DROPPING
from tests.support.families import word_tokenizer

from treegraft.core.errors import SettingError
from treegraft.core.types import (
    BranchCause,
    Observation,
    Origin,
    Status,
    StepContent,
    ToolCall,
    Tree,
)
from treegraft.explore.graft import HybridRollout
from treegraft.explore.independent import Independent
from treegraft.extras.methods.commit import CommitBranching, CommitSettings
from treegraft.policy.engine.scripted import ScriptedEngine
from treegraft.policy.learn.pack import pack_trees
from treegraft.policy.learn.sft import demonstration_tree
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.tags import TagsFormat
from treegraft.rollout.limits import Limits
from treegraft.rollout.loop import Grower
from treegraft.settings.explore import GraftSettings
from treegraft.settings.tools import ToolsSettings
from treegraft.tools.function import FunctionTool
from treegraft.tools.toolbox import Toolbox

THOUGHT = "<think> w7 w8 </think>"
SEARCH = f"{THOUGHT} <search> w1 </search>"
ANSWER = f"{THOUGHT} <answer>\\boxed{{ w9 }}</answer>"
"""Every step thinks the same two words."""


def thrice(path: str) -> str:
    """Searches three times, then answers."""
    return ANSWER if path.count("<result>") == 3 else SEARCH


def growing(explorer: Any = None, replies: Any = thrice, **more: Any) -> tuple[Tree, Any]:
    engine = ScriptedEngine(replies, word_tokenizer(), entropy=more.pop("entropy", 0.5))
    tools = [FunctionTool(search)]
    settings = ToolsSettings(deadline_s=5.0, max_output_chars=200, cache=False, max_concurrent=8)
    limits = {
        "num_leaves": 1,
        "temperature": 1.0,
        "max_completion_tokens": 60,
        "max_agent_steps": 6,
        "max_tool_calls": 4,
        "deadline_s": 5.0,
    }
    retriever = more.pop("retriever", None)
    grower = Grower(
        engine,
        TagsFormat(word_tokenizer(), tools, system_prompt="", thoughts="drop"),
        Toolbox(tools, settings),
        explorer or Independent(),
        Limits(**{**limits, **more}),
        leave,
        retriever=retriever,
    )
    grown = grower.grow(TASKS[0], noise_key=(0, "train", 4), group_id="4/t/0")
    return asyncio.run(grown), engine


def text_of(ids: Any) -> str:
    return str(word_tokenizer().decode(list(ids)))


def context_ids(tree: Tree, step_id: str | None) -> list[int]:
    by_id = {step.id: step for step in tree.steps}
    found: list[int] = []
    while step_id is not None:
        found = by_id[step_id].token_ids.tolist() + found
        step_id = by_id[step_id].parent
    return found


def assert_law_5(tree: Tree, engine: Any) -> None:
    """Each step's context is what the engine was given."""
    given = {call.noise_key[-1]: list(call.prefix_ids) for call in engine.calls}
    sampled = [step for step in tree.steps if step.num_sampled]
    assert len(given) == len(engine.calls) == len(sampled)
    for step in sampled:
        assert given[step.id] == context_ids(tree, step.parent), step.id


def test_the_shape_of_a_rollout() -> None:
    tree, engine = growing()
    assert_law_5(tree, engine)
    shape = [(step.id, step.parent, step.is_context) for step in tree.steps]
    assert shape[:5] == [
        ("0", None, False),
        ("0.0", "0", False),
        ("0.0.0", "0", True),
        ("0.0.0.0", "0.0.0", False),
        ("0.0.0.0.0", "0.0.0", True),
    ]
    anew = tree.steps[2]
    tokens = [*zip(text_of(anew.token_ids).split(), anew.origins.tolist(), strict=True)]
    assert tokens == [
        *((word, Origin.CONTEXT) for word in ("<search>", "w1", "</search>")),
        *((word, Origin.TOOL) for word in ("<result>", "w1", "w2", "</result>")),
    ]
    assert not anew.loss_mask.any()
    path = tree.trajectories()[0]
    assert path.status is Status.COMPLETED and path.num_tool_calls == 3
    assert [step.content.thought for step in path.steps[1:]] == ["w7 w8"] * 4
    # No engine was ever shown a thought.
    assert not any("<think>" in text_of(call.prefix_ids) for call in engine.calls)


def test_tokens_are_those_that_the_policy_saw() -> None:
    """By hand: prompt w0; a step of 7 tokens, its context of 3 + 4; the answer of 9 or so."""
    tree, _ = growing()
    path = tree.trajectories()[0]
    prompt = tree.root.num_tokens
    answer = path.steps[-1].num_tokens
    batch = pack_trees([tree])
    assert batch.num_tokens == prompt + 3 * 7 + 3 * 7 + answer
    # Four rows: after 0, 1, 2 and 3 contexts.
    assert batch.num_path_tokens == 4 * prompt + (0 + 7) + (7 + 7) + (14 + 7) + (21 + answer)


def test_the_limit_is_of_the_context() -> None:
    """A step takes 7 tokens and leaves 7: with room for 27 the fourth has 6 left of 9."""
    tree, engine = growing(max_completion_tokens=27)
    assert tree.leaves[0].status is Status.TRUNCATED
    assert len(engine.calls) == 4
    assert engine.calls[-1].sampling.max_new_tokens == 6
    tree, engine = growing(max_completion_tokens=20)
    # The third step's result does not fit, so that it ends the rollout.
    assert (len(engine.calls), tree.leaves[0].step_id) == (3, "0.0.0.0.0.0")
    assert tree.leaves[0].status is Status.TRUNCATED


def test_branches_hang_below_contexts() -> None:
    """Entropy rises with the first result: one branch beside the second step of each start."""
    tree, engine = growing(
        branching(), entropy=lambda text: 2.0 if "<result>" in text else 0.5, num_leaves=4
    )
    assert_law_5(tree, engine)
    branches = [step for step in tree.steps if isinstance(step.cause, BranchCause)]
    assert branches and all(step.parent == step.before for step in branches)
    by_id = {step.id: step for step in tree.steps}
    assert all(by_id[str(step.before)].is_context for step in branches)
    decisions = [step.decision for step in tree.steps if step.decision is not None]
    assert sum(one.num_opened for one in decisions) >= len(branches)
    assert len(tree.leaves) == 4


def test_grafts_hang_below_contexts() -> None:
    explorer = HybridRollout(GraftSettings(num_hybrid=1, probability=1.0), num_leaves=1)
    retriever = OneTrace()
    tree, engine = growing(explorer, retriever=retriever, max_completion_tokens=200)
    assert_law_5(tree, engine)
    grafts = [step for step in tree.steps if step.is_graft]
    assert grafts and all(step.parent == step.before for step in grafts)
    # A step after a graft leaves its context behind the graft, which stays.
    after = [step for step in tree.steps if step.before == grafts[0].id]
    anew = [step for step in tree.steps if step.before == after[0].id]
    assert anew[0].is_context and anew[0].parent == grafts[0].id
    # The history that was asked with holds steps alone.
    assert all(content.calls for contents, _ in retriever.asked for content in contents)


def test_commit_branching() -> None:
    """All answers are wrong: a call takes the place of an answer, below the answer's context."""
    settings = CommitSettings(num_starts=1)
    tree, engine = growing(
        CommitBranching(settings),
        replies=lambda path: ANSWER.replace("w9", "w3") if "<result>" in path else SEARCH,
        num_leaves=3,
    )
    by_id = {step.id: step for step in tree.steps}
    retries = [step for step in tree.steps if step.num_by(Origin.FORCED)]
    assert all(by_id[str(step.before)].is_context or step.before == "0" for step in retries)
    given = {call.noise_key[-1]: list(call.prefix_ids) for call in engine.calls}
    for step in retries:
        forced = step.token_ids[step.origins == int(Origin.FORCED)].tolist()
        assert given[step.id] == context_ids(tree, step.parent) + forced


def test_demonstrations_are_seen_as_they_will_be() -> None:
    form = TagsFormat(word_tokenizer(), [FunctionTool(search)], system_prompt="", thoughts="drop")
    seen = (Observation(text="w1 w2"),)
    steps = [
        StepContent(thought="w7", calls=(ToolCall("search", "w1"),), observations=seen),
        StepContent(thought="w8", answer="w9"),
    ]
    tree = demonstration_tree(form, TASKS[0], steps)
    assert [(step.id, step.parent) for step in tree.steps] == [
        ("0", None),
        ("0.0", "0"),
        ("0.0.0", "0"),
        ("0.0.0.0", "0.0.0"),
    ]
    assert "w7" not in text_of(context_ids(tree, "0.0.0")).split()
    assert tree.steps[1].loss_mask.all() and not tree.steps[2].loss_mask.any()


# ---------------------------------------------------------------------- chat templates


def turns_of(template: str, *, keeps: bool = False, thoughts: Any = "auto") -> ChatFormat:
    tokenizer = copy.deepcopy(tokenizer_of("qwen25"))
    tokenizer.chat_template = template
    form = ChatFormat(tokenizer, TOOLS, thoughts=thoughts)
    assert form.drops_thoughts is not keeps
    return form


QWEN3_OF_TRL = "chat_templates/qwen3.jinja"
QWEN3_HASH = "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8"


def qwen3() -> str:
    """Qwen3's own template, as TRL's wheel carries it."""
    place = importlib.util.find_spec("trl")
    assert place is not None and place.origin is not None
    text = (Path(place.origin).parent / QWEN3_OF_TRL).read_text()
    assert hashlib.sha256(text.encode()).hexdigest() == QWEN3_HASH
    return text


STRIPPING = DROPPING.replace("[-1] %}", "[-1].lstrip() %}")


@pytest.mark.parametrize(
    ("name", "thoughts"), [("dropping", "auto"), ("stripping", "auto"), ("qwen3", "drop")]
)
@pytest.mark.parametrize("said", ["", "I look it up."])
def test_contexts_are_what_the_template_gives(name: str, thoughts: str, said: str) -> None:
    """Five turns: before each, the tokens are those of the template's own rendering of all that
    came before, token for token."""
    templates = {"dropping": DROPPING, "stripping": STRIPPING}
    form = turns_of(templates.get(name) or qwen3(), thoughts=thoughts)
    tokenizer = form._tokenizer
    messages: list[dict[str, Any]] = [
        *form_messages(form),
    ]
    context = list(form.prompt_ids(TASK))
    for number in range(5):
        rendered = tokenizer.apply_chat_template(
            messages, tools=form._template.schemas, tokenize=False, add_generation_prompt=True
        )
        assert form._decode(context) == rendered
        # White space that stays behind a thought would join the last token of the prompt.
        assert context == form._encode(rendered) or name == "dropping"
        call = {"name": "search", "arguments": {"query": f"w{number}"}}
        thought = f"<think>\nI need w{number}\n</think>\n\n"
        text = f"{said}\n" if said else ""
        written = f"{thought}{text}<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
        ids = form._encode(written)
        parsed = form.parse_step(ids)
        assert parsed.violation is None and parsed.content.calls
        seen = Observation(text=f"about w{number}")
        for span, _ in form.context_spans(ids, [seen]):
            context += span
        # Qwen3 itself shows thoughts within one question: the agent's choice leaves them out.
        content = said if name == "qwen3" else f"{thought}{said}"
        messages.append(
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"type": "function", "function": call}],
            }
        )
        messages.append({"role": "tool", "name": "search", "content": seen.text})
    assert "I need" not in form._decode(context)


def form_messages(form: ChatFormat) -> list[dict[str, Any]]:
    return TASK.conversation(form.system_prompt)


def test_a_template_says_what_becomes_of_thoughts() -> None:
    assert turns_of(DROPPING).drops_thoughts
    # Within the turns of one question Qwen3 shows all thoughts.
    assert not turns_of(qwen3(), keeps=True).drops_thoughts
    with pytest.raises(
        SettingError, match=r"drops the thoughts of earlier turns.*set it to 'drop'"
    ):
        turns_of(DROPPING, thoughts="keep")


def test_a_call_that_no_template_can_say_stays_as_it_was() -> None:
    form = turns_of(DROPPING)
    call = {"name": "nobody", "arguments": {"x": 1}}
    ids = form._encode(
        f"<think>\na\n</think>\n\n<tool_call>\n{json.dumps(call)}\n</tool_call><|im_end|>"
    )
    own, _ = form.context_spans(ids, [Observation(text="no such tool")])
    assert own[1] is Origin.CONTEXT
    assert "nobody" in form._decode(own[0]) and "<think>" not in form._decode(own[0])
