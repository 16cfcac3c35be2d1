"""The engine's and the learner's passes on a device other than the CPU, by tensors that have shapes
and no numbers: an operation on tensors of two devices fails.

A script, since the device stays for good: `python -m tests.support.shapes_only`. The device is one
that torch lets Python register. It is not called "cuda", so what needs CUDA itself is left out:
FlexAttention. Where the host asks for a number, for which a card makes it wait, it gets a 1, and
the place is counted.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from tests.support.trees import Part, build_tree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoConfig, AutoModelForCausalLM

from treegraft.algo.advantages import assign_credit
from treegraft.policy.engine.blocks import BlockPool, PathCache
from treegraft.policy.engine.forward import HookedForward
from treegraft.policy.engine.ragged import RaggedPlan, Segment
from treegraft.policy.engine.sampling import sample_tokens
from treegraft.policy.learn.learner import Learner
from treegraft.policy.output_head import OutputHead
from treegraft.policy.shapes import published_shape
from treegraft.policy.weights import bit_sum
from treegraft.settings.policy import LearnSettings, LossSettings

DEVICE = "card"
SHAPES = ("qwen2.5-7b", "qwen3-8b")
SMALL = {"num_hidden_layers": 2, "vocab_size": 3000}
"""What is cut: all layers are alike, and the vocabulary has more than one block of the draw."""
waits: Counter[str] = Counter()
"""Where the host asked the device for a number."""
shapes_alone = FakeTensorMode(allow_non_fake_inputs=True)


def prepare() -> None:
    """Registers the device, and replaces what cannot be done without numbers."""
    _setup_privateuseone_for_python_backend(DEVICE)
    tensor = torch.tensor
    from_numpy = torch.from_numpy

    # Torch makes these without asking the mode, the last one only of a device that is none.
    def make(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        found = tensor(data, **options)
        return found if device is None else found.to(device)

    def make_like(like: Tensor, data: Any, *, dtype: Any = None) -> Tensor:
        return make(data, dtype=dtype or like.dtype, device=like.device)

    def make_of_array(array: Any) -> Tensor:
        return shapes_alone.from_tensor(from_numpy(array))

    torch.tensor = make
    torch.from_numpy = make_of_array
    Tensor.new_tensor = make_like  # type: ignore[assignment, method-assign]
    for name, number in (("__float__", 1.0), ("__int__", 1), ("__bool__", True), ("item", 1.0)):
        _answer(Tensor, name, lambda _, number=number: number)
    _answer(Tensor, "tolist", lambda one: torch.ones(one.shape, device="cpu").numpy().tolist())
    _answer(Tensor, "nonzero", lambda one: torch.arange(one.numel(), device=one.device)[:, None])
    _answer(torch, "bincount", lambda one, minlength: one.new_zeros(minlength))


def _answer(owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
    real = getattr(owner, name)

    def answer(one: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(one, FakeTensor):
            return real(one, *args, **options)
        if one.device.type == DEVICE:
            places = (at for at in traceback.extract_stack() if "treegraft" in at.filename)
            last = [*places][-1]
            waits[f"{last.filename.rpartition('treegraft/')[2]}:{last.lineno}"] += 1
        return stand_in(one, *args, **options)

    setattr(owner, name, answer)


def hollow(shape: str) -> Any:
    """Returns a model of a published shape on the device."""
    fields = {**published_shape(f"shape:{shape}"), **SMALL}
    kind = fields.pop("model_type")
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with shapes_alone:
        return model.to_empty(device=DEVICE)


def sample(model: Any) -> None:
    """Takes in four paths with a common beginning, and decodes one token of each."""
    with shapes_alone:
        pool = BlockPool(model, max_bytes=5e7)
    cache = PathCache(pool, max_rows=4)
    forward = HookedForward(model, None, pack=False)
    rows = [cache.open([*range(60), *range(99 * n, 99 * n + 70)], 140) for n in range(4)]
    for counts in ((129, 64, 65, 100), (1, 1, 1, 1)):
        segments = []
        total = 0
        for row, count in zip(rows, counts, strict=True):
            assert row is not None
            with shapes_alone:
                cache.extend(row, count)
            segments.append(Segment(row, count, total))
            total += count
        plan = RaggedPlan(total, pool, cache.table, segments, None)
        with shapes_alone, torch.inference_mode():
            hidden = forward(*plan.inputs(model.device), plan)
            logits = OutputHead(model)(hidden[:4])
            keys = [("a",), ("b",), None, ("c",)]
            drawn = sample_tokens(logits, [1.0, 0.5, 0.0, 1.0], keys, [0, 1, 2, 3])
        assert {column.shape for column in drawn} == {torch.Size([4])}
        for segment in segments:
            cache.fed(segment.row, segment.count)
    assert not waits, waits


def learn(model: Any) -> None:
    """Makes a whole update: two mini-batches, two epochs, a graft that is learned from."""
    learning = LearnSettings(num_minibatches=2, num_epochs=2, max_pack_tokens=64)
    loss = LossSettings(graft_coef=1.0, engine_ratio_cap=2.0)
    branched = Part("sst", (Part("ss", reward=1.0), Part("rrt", (Part("ss"),), lesson=2)))
    trees = [
        assign_credit(build_tree(Part("ppp", (branched, Part("sss"))), task_id=f"t/{n}"))
        for n in range(2)
    ]
    with shapes_alone:
        learner = Learner(model, learning, loss, length_constant=7)
        assert learner.packing_problem is None, learner.packing_problem
        learned, metrics = learner.learn(trees)
    assert len(learned) == 2 and metrics["learn/num_optimiser_steps"] == 4, metrics
    moved = {weight.device.type for weight in learner.optimiser._masters}
    assert moved == {DEVICE}, moved


def checksum(model: Any) -> None:
    """Sums the bits of every weight."""
    with shapes_alone:
        assert {bit_sum(weight).device.type for weight in model.parameters()} == {DEVICE}


def mix(model: Any) -> None:
    """Adds numbers of two devices; has to fail."""
    with shapes_alone:
        next(model.parameters()) + torch.zeros(1, 1)


def main() -> None:
    """Prints what each part came to, "" where it went well, and where the host waited, in JSON."""
    prepare()
    logging.disable()
    found: dict[str, str] = {}
    for shape in SHAPES:
        model = hollow(shape)
        for part in (sample, checksum, learn, mix):
            name = f"{shape}: {part.__name__}"
            said = ""
            try:
                part(model)
            except Exception as error:
                said = "".join(traceback.format_exception(error)[-4:])
            found[name] = said
        waits_of_learning = dict(waits)
        waits.clear()
    print(json.dumps({"parts": found, "waits": waits_of_learning}))


if __name__ == "__main__":
    main()
