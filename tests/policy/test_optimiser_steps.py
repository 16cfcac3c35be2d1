"""Optimiser steps: passes, records and metrics, float32 masters (law 6: the optimiser's state), and
adapters."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
import transformers
from tests.support.error_codes import raises_code
from tests.support.families import NO_KV, SHAPE, build_model, word_tokenizer
from tests.support.slow_learner import (
    attend_by,
    example_trees,
    gradients_of,
    make_learner,
    plain_scores,
)

from treegraft.core.types import Tree
from treegraft.policy.learn.learner import Learner
from treegraft.policy.learn.optimiser import MasterAdamW
from treegraft.policy.learn.plan import split_evenly
from treegraft.policy.load import load_model, with_adapters
from treegraft.policy.shards import TensorFiles, write_rows
from treegraft.policy.weights import plain_weights
from treegraft.settings.policy import (
    LearnSettings,
    LoraSettings,
    LossSettings,
    ModelSettings,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_the_record_holds_old_logprobs_and_ratios() -> None:
    tree = example_trees(1)[0]
    model = build_model("llama")
    learner, _ = make_learner(model, lr=0.2, num_epochs=2)
    twin = copy.deepcopy(build_model("llama"))
    learned, _ = learner.learn([tree])
    for path in learned[0].trajectories():
        ours = [v for step in path.steps for v in step.old_logprobs[step.sampled_mask].tolist()]
        with torch.no_grad():
            torch.testing.assert_close(
                torch.tensor(ours), plain_scores(twin, path)[0], atol=1e-5, rtol=0
            )
        for step in path.steps:
            assert all(step.ratios[~step.sampled_mask] == 1.0)
    ratios = [r for step in learned[0].steps for r in step.ratios]
    assert any(abs(ratio - 1.0) > 1e-3 for ratio in ratios)


def test_a_tiny_step_survives_in_bfloat16() -> None:
    """1000 steps of 1e-6 relative are 1e-3: nothing in bfloat16 (its unit is 2^-8), all of it in
    the float32 masters."""
    model = torch.nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimiser = MasterAdamW(model, LearnSettings(lr=1e-6, max_grad_norm=1e9))
    for _ in range(1000):
        model.weight.sum().backward()
        optimiser.step()
    # AdamW on a constant gradient moves by lr each step.
    torch.testing.assert_close(
        optimiser.state()["master.weight"], torch.full((1, 4), 0.999), atol=2e-5, rtol=0
    )
    assert model.weight.dtype == torch.bfloat16
    for _ in range(3000):
        model.weight.sum().backward()
        optimiser.step()
    assert float(model.weight[0, 0].detach()) == pytest.approx(0.996, abs=2**-8 / 2)


def test_gradients_move_to_the_masters_as_they_are_made() -> None:
    """Of a chain of layers with tied ends, over two passes: sums are bit-equal to those of all
    gradients moved at the end, and never do two live in bfloat16."""

    class Chain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)
            self.rest = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (self.first, *self.rest, self.first):
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    model = Chain().to(torch.bfloat16)
    plain = copy.deepcopy(model)
    optimiser = MasterAdamW(model, LearnSettings())
    live = list[int]()
    for weight in model.parameters():
        weight.register_hook(
            lambda _: live.append(sum(w.grad is not None for w in model.parameters()))
        )
    sums = [torch.zeros_like(w, dtype=torch.float32) for w in plain.parameters()]
    for x in torch.randn(2, 3, 8).to(torch.bfloat16):
        model(x).float().square().sum().backward()
        plain(x).float().square().sum().backward()
        for total, weight in zip(sums, plain.parameters(), strict=True):
            total += weight.grad
            weight.grad = None
    assert max(live) <= 1 and len(live) == 20
    moved = [master.grad for master in optimiser._masters]
    assert all(torch.equal(a, b) for a, b in zip(moved, sums, strict=True))
    norm = torch.nn.utils.get_total_norm(sums)
    assert optimiser.step() == pytest.approx(float(norm))
    assert all(weight.grad is None for weight in (*model.parameters(), *optimiser._masters))


def test_adamw_by_hand() -> None:
    """One step from zero moments moves by lr · g / (|g| + eps) after clipping to norm 1; warm-up
    halves the first of two."""
    model = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -1.0]]))
    optimiser = MasterAdamW(
        model, LearnSettings(lr=0.1, lr_warmup_steps=2, weight_decay=0.5, max_grad_norm=1.0)
    )
    (model.weight * torch.tensor([[3.0, -4.0]])).sum().backward()
    assert optimiser.step() == pytest.approx(5.0)
    assert optimiser.last_lr == pytest.approx(0.05)
    # w (1 - lr · decay) - lr · sign(g)
    torch.testing.assert_close(
        model.weight.detach(), torch.tensor([[0.975 - 0.05, -0.975 + 0.05]]), atol=1e-6, rtol=0
    )
    assert optimiser.step() == 0.0  # no gradient: nothing moves, the count goes on
    assert optimiser.num_steps == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_without_a_finite_gradient_is_skipped(dtype: torch.dtype, tmp_path: Path) -> None:
    """One number of one of its passes is enough; the third in a row is an error, also where the
    optimiser goes on from its state."""
    models = [torch.nn.Linear(2, 1, bias=False).to(dtype) for _ in range(2)]
    settings_ = LearnSettings(lr=0.1, schedule="linear")
    optimiser, resumed = (MasterAdamW(one, settings_, num_planned=100) for one in models)
    model = models[0]

    def step(wrong: float | None) -> float:
        model.weight.sum().backward()
        if wrong is not None:
            (model.weight * torch.tensor([[1.0, wrong]], dtype=dtype)).sum().backward()
        return optimiser.step()

    assert step(None) == pytest.approx(2**0.5)
    before = {name: tensor.clone() for name, tensor in optimiser.state().items()}
    assert math.isnan(step(math.nan)) and math.isinf(step(math.inf))
    after = optimiser.state()
    assert optimiser.num_steps == 3 and optimiser.last_lr == pytest.approx(0.1 * 98 / 100)
    assert all(torch.equal(after[name], before[name]) for name in before if "." in name)
    assert model.weight.grad is None and not gradients_of(optimiser)
    # A finite one begins the count anew.
    assert step(None) == pytest.approx(2**0.5) and step(math.nan) and step(math.nan)
    resumed.load(files_of(optimiser.state(), tmp_path))
    model = models[1]
    optimiser = resumed
    with raises_code("gradient-not-finite"):
        step(math.nan)
    assert all(bool(tensor.isfinite().all()) for tensor in optimiser.state().values())


def files_of(state: dict[str, torch.Tensor], folder: Path) -> TensorFiles:
    write_rows(folder / "state.safetensors", state, is_first=True)
    return TensorFiles([folder / "state.safetensors"])


def rates(learn: LearnSettings, num_planned: int, num_taken: int, folder: Path) -> list[float]:
    """The learning rates of the first steps, by a model of one weight."""
    model = torch.nn.Linear(1, 1, bias=False)
    found = []
    optimiser = MasterAdamW(model, learn, num_planned=num_planned)
    for taken in range(num_taken):
        if taken == 3:  # a resumed run
            state = files_of(optimiser.state(), folder)
            optimiser = MasterAdamW(model, learn, num_planned=num_planned)
            optimiser.load(state)
        model.weight.grad = torch.ones(1, 1)
        optimiser.step()
        found.append(optimiser.last_lr)
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [8, 8, 8, 8, 8, 8]),
        ({"lr_warmup_steps": 4}, [2, 4, 6, 8, 8, 8]),
        ({"schedule": "linear"}, [8, 6, 4, 2, 0, 0]),
        ({"schedule": "linear", "lr_warmup_steps": 2}, [4, 8, 8, 4, 0, 0]),
        # (1 + cos(0, 45, 90, 135 degrees)) / 2
        ({"schedule": "cosine"}, [8, 4 + 8**0.5, 4, 4 - 8**0.5, 0, 0]),
    ],
)
def test_schedules_by_hand(settings: dict, expected: list[float], tmp_path: Path) -> None:
    """Four steps are planned, and two more are taken, as by a run that was prolonged."""
    found = rates(LearnSettings(lr=8.0, **settings), 4, 6, tmp_path)
    assert found == pytest.approx(expected, abs=1e-12)


def test_weights_decay_but_norms_and_biases_do_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(2.0)
    optimiser = MasterAdamW(model, LearnSettings(lr=0.1, weight_decay=0.5))
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimiser.step()  # without a gradient only the decay moves: 2 (1 - 0.1 · 0.5)
    assert [float(weight.detach().flatten()[0]) for weight in model.parameters()] == pytest.approx(
        [1.9, 2.0, 2.0, 2.0]
    )
    # The warm-up has a decay of its own, for one step: 1.9 (1 - 0.1 · 0.25).
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimiser.step(weight_decay=0.25)
    assert float(model[0].weight[0, 0].detach()) == pytest.approx(1.8525)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimiser_goes_on_from_its_state(dtype: torch.dtype, tmp_path: Path) -> None:
    trees = example_trees(3)

    def learner_of() -> Learner:
        return Learner(
            build_model("llama", dtype=dtype),
            LearnSettings(lr=1e-3),
            LossSettings(),
            length_constant=7,
        )

    whole = learner_of()
    whole.learn(trees)
    resumed = learner_of()
    resumed.optimiser.load(files_of(whole.optimiser.state(), tmp_path))
    for learner in (whole, resumed):
        learner.learn(trees)
    ours = resumed.optimiser.state()
    theirs = whole.optimiser.state()
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            resumed.weights().tensors.values(), whole.weights().tensors.values(), strict=True
        )
    )


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("way", ["kernels", "dense", "gathered"])
def test_learning_does_not_depend_on_torchs_default_type(
    way: str, default: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend_by(way, monkeypatch)
    models = [build_model("llama") for _ in range(2)]

    def learned(model: torch.nn.Module) -> tuple[list[Tree], dict[str, torch.Tensor]]:
        learn = LearnSettings(lr=1e-2, num_epochs=2)
        learner = Learner(model, learn, LossSettings(), length_constant=7)
        trees, _ = learner.learn(example_trees(3))
        return trees, learner.optimiser.state()

    trees, state = learned(models[0])
    torch.set_default_dtype(default)
    try:
        other_trees, other_state = learned(models[1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert other_trees == trees
    assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_dropout_is_off_in_training_too(tmp_path: Path) -> None:
    """Gradient checkpointing takes training mode, in which modules would drop."""
    config = transformers.GPTNeoXConfig(**NO_KV, hidden_dropout=0.3, attention_dropout=0.3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    settings_ = ModelSettings(path=str(tmp_path), gradient_checkpointing=True)
    model = with_adapters(load_model(settings_)[0], settings_, seed=0)
    ids = torch.arange(3, 23)[None]
    with torch.no_grad():
        first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
    assert torch.equal(first, second)
    assert model.config.hidden_dropout == 0.0


@pytest.mark.parametrize("family", ["Mixtral", "Phimoe"])
def test_routers_add_no_noise_where_activations_are_recomputed(family: str, tmp_path: Path) -> None:
    """Each layer runs once more in the backward pass, and gives what it gives in evaluation."""
    noise = {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1, "num_local_experts": 4}
    config = getattr(transformers, f"{family}Config")(**SHAPE, **noise)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    plain = ModelSettings(path=str(tmp_path))
    settings_ = plain.model_copy(update={"gradient_checkpointing": True})
    model = with_adapters(load_model(settings_)[0], settings_, seed=0)
    runs = list[int]()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    ids = torch.arange(3, 23)[None]
    logits = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(logits, load_model(plain)[0](input_ids=ids, use_cache=False).logits)
    logits.sum().backward()
    assert len(runs) == 2 * len(model.model.layers)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens"])
def test_adapters_of_tied_embeddings_are_refused(target: str) -> None:
    settings_ = ModelSettings(lora=LoraSettings(rank=2, targets=["q_proj", target]))
    with raises_code("lora-targets-tied"):
        with_adapters(build_model("llama-tied"), settings_, seed=0)
    with_adapters(build_model("llama"), settings_, seed=0)


def test_a_schedule_counts_minibatches_without_a_tree() -> None:
    """One tree in four mini-batches and two epochs: two of eight steps are taken."""
    learn = LearnSettings(num_minibatches=4, num_epochs=2, schedule="linear")
    learner = Learner(build_model("llama"), learn, LossSettings(), length_constant=7, num_updates=4)
    found = []
    for _ in range(4):
        learner.learn(example_trees(1))
        found.append((learner.optimiser.num_steps, learner.optimiser.last_lr / learn.lr))
    # Its second step is the one before last of the 8 that the plan has for an update.
    assert [number for number, _ in found] == [8, 16, 24, 32]
    assert [share for _, share in found] == pytest.approx([31 / 32, 23 / 32, 15 / 32, 7 / 32])


def test_lora_weights_are_those_of_merge_and_unload() -> None:
    model = with_adapters(
        build_model("llama"), ModelSettings(lora=LoraSettings(rank=2, alpha=8)), seed=1
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:  # B starts at zero
                weight.copy_(torch.randn(weight.shape, generator=generator))
    ours = {name: tensor.clone() for name, tensor in plain_weights(model).items()}
    plain_names = build_model("llama").state_dict().keys()
    merged = model.merge_and_unload().state_dict()
    assert ours.keys() == merged.keys() == plain_names
    for name, tensor in merged.items():
        torch.testing.assert_close(ours[name], tensor, atol=1e-6, rtol=1e-6)
    assert any(
        not torch.equal(ours[name], build_model("llama").state_dict()[name]) for name in ours
    )


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_lora_learns_its_adapters_only(is_checkpointing: bool) -> None:
    settings_ = ModelSettings(lora=LoraSettings(rank=2), gradient_checkpointing=is_checkpointing)
    model = with_adapters(build_model("llama"), settings_, seed=1)
    learner = Learner(model, LearnSettings(lr=1e-2), LossSettings(), length_constant=7)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    _, metrics = learner.learn(example_trees(3))
    moved = {
        name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])
    }
    assert moved and all("lora_" in name for name in moved)
    assert metrics["learn/grad_norm"] > 0


def test_minibatches_are_cut_evenly() -> None:
    assert split_evenly(7, 3) == [(0, 1), (2, 3), (4, 5, 6)]
    assert split_evenly(2, 3) == [(), (0,), (1,)]
    assert split_evenly(4, 1) == [(0, 1, 2, 3)]


def test_metrics_are_per_contribution() -> None:
    """BRANCHING: loss tokens on paths 2+2+2, 2+2+2, (2+2+1), (2+3), 4, 2; the failed leaf's shared
    token has none of its own."""
    tree = example_trees(1)[0]
    learner, _ = make_learner(build_model("llama"))
    _, metrics = learner.learn([tree])
    assert metrics["learn/num_contributions"] == 6 + 6 + 5 + 5 + 4 + 2
    path_tokens = [5 + 4 + 5 + 2, 5 + 4 + 5 + 3, 5 + 4 + 5 + 1, 5 + 4 + 3, 5 + 4, 5 + 2, 5 + 2]
    assert metrics["learn/unique_frac"] == pytest.approx(
        metrics["learn/num_unique_tokens"] / sum(path_tokens)
    )
    assert metrics["learn/num_unique_tokens"] == 5 + 4 + 5 + 2 + 3 + 1 + 3 + 4 + 2 + 2
    assert (
        metrics["learn/ratio_max"] == 1.0
        and metrics["learn/clip_frac"] == 0.0
        and metrics["learn/approx_kl"] == 0.0
    )
