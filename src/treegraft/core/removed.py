"""What earlier versions had and this one has not, and what to use instead."""

from __future__ import annotations

_FORCED = "Gone since 0.8; 'commit' (docs/methods.md) begins answers and calls in failed groups."
_BREAD = "Gone since 0.8; explore.prefix.rule = 'prefixrl' begins below stored steps, too."
_PAIRS = "Gone since 0.8; loss.graft_coef imitates openings that paid, with 'commit'."
_EVIDENCE = "Gone since 0.8; credit.attribution = 'states' (GiGPO) compares steps in a state."
_WARNING = "Gone since 0.8; the viewer draws the metric that it looked at (docs/warnings.md)."
_PRICE = "Gone since 0.8; the report counts the tokens read and written."
_DRAWS = (
    'Gone since 0.8: vLLM draws, and "measured" reports exact entropies on GPUs; the tokens of the'
    ' native engine come from engine.kind = "native" alone.'
)
_SYMPTOMS = "Gone since 0.8; health.violated and health.entropy_collapse warn of a collapse."

_MOVED = {
    "evals.suites": "extras.suites.sets",
    "study": "extras.lab.study",
    "tasks.arithmetic": "extras.tasks.arithmetic",
    "tasks.sokoban": "examples.environments.sokoban",
    "tasks.verifiers": "extras.environments.verifiers.tasks",
}
"""Modules of 0.7 that recipes and pages named."""


def _world(name: str, called: str) -> dict[str, str]:
    """The entries of an environment that is an example now."""
    path = f"treegraft.examples.environments.{name}:{called}"
    since = f"Since 0.8 {called} is an example:"
    return {
        name: f'{since} write tasks.kind = "{path}Tasks" and environment.kind = "{path}", as its'
        f" recipe '{name}' does.",
        f"tasks.{name}": f'{since} with tasks.kind = "{path}Tasks" its options are entries of'
        " tasks.options.",
    }


_LEARNER = (
    "Gone since 0.8: learn.ranks = N, or torchrun, starts the learner's ranks; `ray start"
    " --num-gpus=0` leaves them the GPUs of their machine."
)

REMOVED: dict[str, str] = {
    "answer_leaf": _FORCED,
    "axpo": _FORCED,
    "explore.axpo": _FORCED,
    "explore.prefix.num_probes": _BREAD,
    "explore.prefix.rule.bread": _BREAD,
    "continuation": _FORCED,
    "counterfactual": _FORCED,
    "cluster.learner_gpus": _LEARNER,
    "cluster.learner_ranks": _LEARNER,
    "cluster.max_restarts": "Gone since 0.8; a lost rank ends the run, and --resume goes on.",
    "credit.evidence": _EVIDENCE,
    "evidence": _EVIDENCE,
    "explore.answer_leaf": _FORCED,
    "explore.continuation": _FORCED,
    "explore.counterfactual": _FORCED,
    "explore.first_tokens": _FORCED,
    "first_tokens": _FORCED,
    "loss.pair_beta": _PAIRS,
    "loss.pair_coef": _PAIRS,
    "buffer.build.price_read": _PRICE,
    "buffer.build.price_written": _PRICE,
    "publish.kind": (
        "Gone since 0.8: weights go through publish.folder, with LoRA's adapters merged; shared"
        ' memory is "/dev/shm/NAME". For servers that somebody else gives weights, see'
        " treegraft.parts.served.ServerEngine."
    ),
    "explore.entropy.allocation": (
        "Gone since 0.8: branches are granted by rounds, in the order of the tree."
    ),
    "explore.entropy.ranking": (
        "Gone since 0.8: branches are granted by rounds, in the order of the tree."
    ),
    "engine.vllm.entropies.auto": _DRAWS,
    "engine.vllm.entropies.exact": _DRAWS,
    "engine.vllm.num_servers": (
        'Gone since 0.8: engine.vllm.gpus has an entry for each server, ["0", "1"] for two.'
    ),
    "engine.vllm.cache_gb": (
        'Gone since 0.8: use engine.vllm.server_args = ["--kv-cache-memory-bytes", "BYTES"], and on'
        " a CPU the variable VLLM_CPU_KVCACHE_SPACE."
    ),
    "engine.vllm.batch_invariant": (
        "Gone since 0.8: set the variable VLLM_BATCH_INVARIANT=1, which servers of a run inherit."
    ),
    "engine.vllm.max_restarts": (
        "Gone since 0.8: a server that dies is left out; a resumed run starts its servers again."
    ),
    "engine.vllm.hang_timeout_s": (
        "Gone since 0.8: a server that hangs is left out at the next publish (engine.deadline_s)."
    ),
    "buffer.grow.capacity": "Gone since 0.8: traces stay in the buffer.",
    "buffer.sources": (
        "Gone since 0.8: build or import a buffer of these agents alone"
        " (buffer.build.source names an agent)."
    ),
    "environment.tools": (
        "Gone since 0.8: a subclass of the environment's class has the methods that are tools, and"
        " None in place of others."
    ),
    "tools.max_calls_per_s": (
        "Gone since 0.8: tools.max_concurrent bounds the calls under way, and a refused call of a"
        " remote tool is tried again (tools.num_retries)."
    ),
    "tools.replay": "Gone since 0.8: results in tools.cache_path are used wherever they are there.",
    **{
        f"health.{name}": _WARNING
        for name in (
            "answer_not_found",
            "policy_still",
            "one_sign",
            "tool_failing",
        )
    },
    "health.answer_copied": "Gone since 0.8; the tree page of the viewer shows what was copied.",
    "health.symptoms_every": _SYMPTOMS,
    "health.success_falling": _SYMPTOMS,
    "health.question_ignored": _SYMPTOMS,
    "model.lora.merge": "Gone since 0.8: checkpoints hold the merged weights.",
    "learn.compile_kernels": "Gone since 0.8: kernels are taken where they prove right.",
    "format.answer.last_line": 'Gone since 0.8: "regex" finds it by format.answer_pattern.',
    "learn.offload": "Gone since 0.8: shards lie on the GPUs; with more ranks each has less.",
    "learn.replicate": "Gone since 0.8: weights are divided among all ranks.",
    **{f"treegraft.{old}": f"Since 0.8 it is treegraft.{new}." for old, new in _MOVED.items()},
    "track.spans": (
        "Gone since 0.8; the metrics time/* split the time of an update, and torch.profiler shows"
        " operators."
    ),
    "track.prometheus": "Gone since 0.8; use a tracker, or read metrics.jsonl.",
    **_world("babyai", "BabyAI"),
    **_world("scienceworld", "ScienceWorld"),
    **_world("sokoban", "Sokoban"),
    **_world("textworld", "TextWorld"),
}
"""By the name of an explorer, a kind or an objective ("answer_leaf"), or the dotted name of a
setting, of a value of one ("engine.vllm.entropies.exact") or of a table of settings
("explore.answer_leaf"), or the name of a module: a sentence that says since when it is gone and
what takes its place."""

_CONSTANT: dict[str, str] = {
    "tools.num_retries": "2",
    "tools.backoff_s": "0.5, doubled each time",
    "tools.search.timeout_s": "60",
    "tools.browse.timeout_s": "20",
    "tools.browse.max_bytes": "5,000,000",
    "tools.browse.max_redirects": "5",
    "tools.browse.num_passages": "3",
    "tools.browse.passage_chars": "600",
    "tools.browse.respect_robots": "true",
    "tools.browse.user_agent": "'Treegraft'",
    "tools.browse.num_workers": "2",
    "tools.python.max_memory_mb": "64 with 'monty' and 512 with 'bwrap'",
    "tools.python.max_files_mb": "16",
    "tools.python.max_threads": "16",
    "environment.max_replay_calls": "20",
    "environment.success_reward": "1",
    "buffer.num_tries": "4",
    "eval.max_agent_steps": "rollout.max_agent_steps",
    "model.tiny.num_kv_heads": "half of model.tiny.num_heads",
    "reward.overlong_tokens": "a fifth of rollout.max_completion_tokens",
    "explore.entropy.allocation": "'round'",
    "explore.entropy.ranking": "'order'",
    "explore.balanced.budget_weight": "0.5",
    "explore.balanced.penalty": "0.05",
    "explore.commit.num_retries": "2",
    "explore.commit.tool": "each tool that was called, in turn",
    "explore.commit.min_reward": "1",
    "explore.prefix.num_places": "1",
    "buffer.build.max_reply_tokens": "rollout.max_completion_tokens",
    "buffer.build.timeout_s": "120",
    "buffer.build.max_retries": "4",
    "sampler.target": "0.5",
    "sampler.attention_temperature": "0.2",
    "sampler.every": "2",
    "sampler.decay": "0.8",
    "replay.capacity": "512",
    "eval.min_p": "0",
    "engine.native.max_prefill_tokens": "512",
    "engine.native.pack_weights": "true",
    "engine.native.compile_kernels": "true",
    "engine.vllm.start_timeout_s": "600",
    "engine.noise": "'philox'",
    "rollout.max_staleness": "0",
    "learn.sequence_parallel": "1",
    "credit.eps": "1e-6",
    "credit.stored": "'joint'",
    "credit.state_weight": "1",
    "credit.discount": "0.95",
    "loss.kept_high": "1",
    "loss.graft_gamma": "0.1",
    "loss.future_half_life": "64",
    "loss.future_highest": "1.2",
    "learn.final_lr_frac": "0",
    "learn.vocab_chunk": "2,048",
    "warmup.min_reward": "none; warmup.num_best chooses demonstrations",
    "warmup.final_lr_frac": "0.05 with schedule = 'linear' and 0 with 'cosine'",
    "track.project": "that of the environment: TRACKIO_PROJECT, WANDB_PROJECT",
    "health.window": "3",
}
"""Settings of earlier versions that always have this value now."""
REMOVED |= {name: f"Gone since 0.8: it is always {value}." for name, value in _CONSTANT.items()}


def instead(name: str) -> str:
    """Returns the sentence for a name, or for the table it belongs to, with a space before it; an
    empty string if no version had it."""
    while name:
        if sentence := REMOVED.get(name):
            return f" {sentence}"
        name = name.rpartition(".")[0]
    return ""
