"""vLLM as TRL's own generation code sees it, over a tiny model of transformers.

Faked: the package `vllm` (the names that TRL imports from it). Real: `VLLMGeneration`,
`GRPOTrainer`.
"""

from __future__ import annotations

import math
import sys
import time
import types
from collections.abc import Iterable
from enum import Enum
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.generation import vllm_generation

MAX_CONTEXT = 160


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Logprob:
    def __init__(self, logprob: float, rank: int) -> None:
        self.logprob = logprob
        self.rank = rank


class Writing:
    """A completion under way."""

    def __init__(self, prompt: list[int], fields: dict[str, Any]) -> None:
        self.prompt = prompt
        self.fields = fields
        self.ids: list[int] = []
        self.rows: list[dict[int, float]] = []
        self.generator = torch.Generator().manual_seed(fields["seed"])

    def step(self, model: Any, tokenizer: Any) -> bool:
        """Draws one token, and returns whether it was the last."""
        with torch.inference_mode():
            ids = torch.tensor([[*self.prompt, *self.ids]])
            logits = model(input_ids=ids, use_cache=False).logits[0, -1].float()
        row = (logits / self.fields["temperature"]).log_softmax(dim=0)
        token = int(torch.multinomial(row.exp(), 1, generator=self.generator))
        self.ids.append(token)
        values, places = row.topk(self.fields["logprobs"])
        likely = dict(zip(places.tolist(), values.tolist(), strict=True))
        self.rows.append({**likely, token: float(row[token])})
        text = tokenizer.decode(self.ids)
        return (
            token in self.fields["stop_token_ids"]
            or any(stop in text for stop in self.fields["stop"])
            or len(self.ids) == self.fields["max_tokens"]
        )


class FakeEngine:
    """`LLM.llm_engine`: each step draws a token for every request."""

    def __init__(self, path: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model_config = types.SimpleNamespace(max_model_len=MAX_CONTEXT)
        self.model_executor = self.driver_worker = self.model_runner = self
        self.requests: dict[str, Writing] = {}
        self.most_at_once = self.num_loads = self.num_aborted = self.num_awaited = 0
        """`num_awaited`: requests that must be there at once before a token is drawn."""
        self.fails = False
        owner = self

        class Loading(torch.nn.Module):
            def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
                owner.load_weights(weights)

        self.plain = self.model
        self.model_loader = Loading()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert not self.requests, "weights moved under a running request"
        own = dict(self.plain.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
                self.num_loads += 1

    def add_request(self, name: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        assert params.output_kind is RequestOutputKind.FINAL_ONLY
        if len(prompt["prompt_token_ids"]) >= MAX_CONTEXT:
            raise ValueError("the prompt is too long")
        self.requests[name] = Writing(prompt["prompt_token_ids"], vars(params))
        self.most_at_once = max(self.most_at_once, len(self.requests))

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.requests.pop(name, None)
            self.num_aborted += 1

    def step(self) -> list[Any]:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory")
        if self.most_at_once < self.num_awaited:
            time.sleep(0.001)
            return []
        done = []
        for name, one in list(self.requests.items()):
            if one.step(self.plain, self.tokenizer):
                del self.requests[name]
                rows = [{t: Logprob(v, 0) for t, v in row.items()} for row in one.rows]
                output = types.SimpleNamespace(token_ids=one.ids, logprobs=rows)
                done.append(types.SimpleNamespace(request_id=name, finished=True, outputs=[output]))
        return done


class FakeLLM:
    """vLLM in the trainer's process."""

    def __init__(self, *, model: str, enable_sleep_mode: bool = False, **options: Any) -> None:
        assert options["logprobs_mode"] == "processed_logprobs"
        self.llm_engine = FakeEngine(model)
        # What TRL calls `...model_runner.model.load_weights`.
        self.llm_engine.model = self.llm_engine.model_loader
        self.asleep: set[str] = set()
        self.num_resets = 0

    def sleep(self, level: int) -> None:
        self.asleep = {"weights", "kv_cache"}
        with torch.no_grad():
            for weight in self.llm_engine.plain.parameters():
                weight.fill_(math.nan)

    def wake_up(self, tags: list[str]) -> None:
        self.asleep -= set(tags)

    def reset_prefix_cache(self) -> None:
        self.num_resets += 1


def install(setattr_: Any = setattr) -> None:
    """Has TRL find the fakes.

    Args:
        setattr_: as that of `pytest.MonkeyPatch`, which takes everything back.
    """
    setattr_(vllm_generation, "is_vllm_available", lambda *_, **__: True)
    for name, value in {"LLM": FakeLLM, "SamplingParams": SamplingParams}.items():
        # Names that TRL has only beside vLLM.
        vars(vllm_generation).setdefault(name, None)
        setattr_(vllm_generation, name, value)
    assert sys.modules[SamplingParams.__module__].RequestOutputKind is RequestOutputKind
