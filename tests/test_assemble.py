"""The parts of a run: how many copies of the model there are, and who holds them."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny
from transformers import PreTrainedModel

from treegraft.assemble import Needs, Parts
from treegraft.session import Session
from treegraft.settings.load import load_config

# peft uses names that transformers is giving up.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")

SCRIPTED: dict[str, Any] = {"engine": {"kind": "tests.test_assemble:make_scripted"}}


def make_scripted(*, tokenizer: Any, **_: Any) -> Any:
    from treegraft.policy.engine.scripted import ScriptedEngine

    return ScriptedEngine([], tokenizer)


def num_embeddings() -> int:
    """Returns how many embedding matrices with memory of their own are alive."""
    gc.collect()
    models = [found for found in gc.get_objects() if issubclass(type(found), PreTrainedModel)]
    weights = {id(model.get_input_embeddings().weight): model for model in models}
    return sum(
        model.get_input_embeddings().weight.device.type != "meta" for model in weights.values()
    )


@pytest.mark.parametrize(
    ("needs", "tables", "copies"),
    [
        ("engine", {}, 1),
        ("engine", SCRIPTED, 0),
        ("learner", {}, 2),
        ("learner", SCRIPTED, 1),
    ],
    ids=["evaluation", "evaluation, own engine", "training", "training, own engine"],
)
def test_the_model_is_in_memory_as_often_as_it_is_needed(
    needs: Needs, tables: dict[str, Any], copies: int
) -> None:
    """The engine samples from one; what learns is another, whose weights it alone changes."""
    config = load_config(tiny(**tables))
    gc.freeze()  # what other tests have left is not looked through

    async def held() -> int:
        async with Parts.build(config, needs=needs):
            return num_embeddings()

    assert asyncio.run(held()) == copies
    assert num_embeddings() == 0


def test_adapters_change_the_learners_model_and_not_the_engines() -> None:
    config = load_config(tiny(model={"lora": {"rank": 2}}))

    with Session(config) as session:
        engine: Any = session.engine
        ours = session.learner.model.state_dict()
        theirs = engine.model.state_dict()
        for name, tensor in session.learner.weights():
            torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=0)
        assert any("lora_" in name for name in ours)
        assert not any("lora_" in name for name in theirs)
