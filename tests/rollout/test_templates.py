"""The chat templates that Treegraft ships, and which of them a model gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tests.rollout.test_format_chat import TASK, TOOLS
from tests.support.chat_templates import BAD, MISTRAL
from tests.support.error_codes import raises_code
from tests.support.smollm2 import smollm2

from treegraft.core.types import Observation, StepContent, ToolCall
from treegraft.rollout.formats.build import build_format
from treegraft.rollout.formats.chat import ChatFormat
from treegraft.rollout.formats.shipped import SHIPPED, fitting, shipped_template, use_template
from treegraft.settings.tasks import FormatSettings

ENDS = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "plain": "<|endoftext|>",
}


def tokenizer_with(name: str) -> Any:
    """SmolLM2's tokenizer with the marks of a template, and without a template."""
    tokenizer = copy.deepcopy(smollm2())
    marks = [*SHIPPED[name], *(["</s>"] if name == "mistral" else [])]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    tokenizer.eos_token = ENDS[name]
    tokenizer.chat_template = None
    return tokenizer


def settings(template: str | None = None, **more: Any) -> FormatSettings:
    return FormatSettings(kind="chat", chat_template=template, require_boxed=False, **more)


@pytest.mark.parametrize("requires_think", [True, False])
@pytest.mark.parametrize("name", list(SHIPPED))
def test_a_path_is_what_the_template_writes_of_the_whole_conversation(
    name: str, requires_think: bool
) -> None:
    tokenizer = tokenizer_with(name)
    use_template(name, tokenizer)
    asked = settings("own", require_think=requires_think, system_prompt="Be brief.")
    form = build_format(asked, tokenizer, TOOLS)
    assert not form.notes
    calls = (ToolCall("search", "6 * 7"), ToolCall("add", '{"a": 41}'))
    seen = (Observation(text='It is "42".'), Observation(text="42"))
    steps = [
        StepContent(thought="look", calls=calls, observations=seen),
        StepContent(thought="so", answer="42"),
    ]
    path = list(form.prompt_ids(TASK))
    for step in steps:
        for ids, _ in form.render_step(step):
            path += ids
    thoughts = ["<think>\nlook\n</think>\n\n", "<think>\nso\n</think>\n\n"]
    if not requires_think:
        thoughts = ["look", "so\n\n"]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": TASK.question},
        {
            "role": "assistant",
            "content": thoughts[0],
            "tool_calls": [
                {"function": {"name": "search", "arguments": {"query": "6 * 7"}}},
                {"function": {"name": "add", "arguments": {"a": 41}}},
            ],
        },
        *({"role": "tool", "content": one.text} for one in seen),
        {"role": "assistant", "content": f"{thoughts[1]}\\boxed{{42}}"},
    ]
    assert isinstance(form, ChatFormat)
    schemas = form._template.schemas
    whole = tokenizer.apply_chat_template(messages, tools=schemas, tokenize=False)
    assert tokenizer.decode(path) == whole.rstrip("\n")


@pytest.mark.parametrize("name", list(SHIPPED))
def test_a_model_without_a_template_gets_the_one_that_fits(name: str) -> None:
    tokenizer = tokenizer_with(name)
    # SmolLM2 knows ChatML's marks beside those added, so that only its end token decides.
    assert name in list(fitting(tokenizer))
    form = build_format(settings(), tokenizer, TOOLS)
    assert tokenizer.chat_template == shipped_template(name)
    assert form.notes == (
        f"the model's tokenizer has no chat template. Treegraft's own template '{name}' takes its"
        " place; format.chat_template can name another.",
    )


def test_smollm2_gets_one_and_keeps_its_own_where_that_will_do() -> None:
    tokenizer = copy.deepcopy(smollm2())
    own = tokenizer.chat_template
    with raises_code("template-invalid"):
        build_format(settings("own"), tokenizer, TOOLS)
    assert not build_format(settings(), tokenizer, []).notes
    assert tokenizer.chat_template == own
    form = build_format(settings(), tokenizer, TOOLS)
    assert tokenizer.chat_template == shipped_template("chatml")
    assert "does not show the agent its tools" in form.notes[0] and "'chatml'" in form.notes[0]
    # As in a checkpoint, whose tokenizer has the template already.
    assert not build_format(settings(), tokenizer, TOOLS).notes


@pytest.mark.parametrize(
    ("name", "own", "part"),
    [("chatml", BAD["the name of each call beside"], "name"), ("mistral", MISTRAL, "tool_call_id")],
)
def test_where_calls_are_named_beside_their_results_ours_takes_its_place(
    name: str, own: str, part: str
) -> None:
    """As vLLM's Hermes file does with the name, and Mistral's templates with the id: neither is
    known before the call is made, so no result could be appended."""
    tokenizer = tokenizer_with(name)
    tokenizer.chat_template = own
    form = build_format(settings(require_think=False), tokenizer, TOOLS)
    assert tokenizer.chat_template == shipped_template(name)
    assert f"it writes the {part} of each call beside its result" in form.notes[0]
    assert f"'{name}' takes its place" in form.notes[0]


def test_a_model_with_other_marks_is_refused_and_keeps_its_own() -> None:
    tokenizer = tokenizer_with("plain")
    tokenizer.chat_template = "{% for one in messages %}[INST]{{ one.content }}[/INST]{% endfor %}"
    own = tokenizer.chat_template
    with raises_code("template-invalid"):
        build_format(settings(), tokenizer, TOOLS)
    assert tokenizer.chat_template == own


def test_names_of_templates_are_told() -> None:
    with raises_code("template-unreadable"):
        use_template("chatlm", None)
