"""From [engine] to an engine that is open."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from treegraft.core.import_paths import load_object, make
from treegraft.core.interfaces import Engine, Tokenizer
from treegraft.core.registry import find
from treegraft.policy.shapes import ModelShape
from treegraft.settings.config import Config

_VLLM = "treegraft.policy.engine.vllm.build"
"""By name, as engines of extensions are: a run without servers has no part of it."""


def needs_weights(config: Config, model_path: Path | str) -> bool:
    """Returns whether the engine gets its weights from the process that makes it."""
    if config.engine.kind == "vllm":
        needed: bool = load_object(f"{_VLLM}:needs_weights")(config, model_path)
        return needed
    return config.engine.kind == "native"


@asynccontextmanager
async def opened_engine(
    config: Config, model: Any, tokenizer: Tokenizer, model_path: Path | str, num_ranks: int = 0
) -> AsyncIterator[Engine]:
    """Holds the engine of a recipe.

    Args:
        num_ranks: how many processes will learn, this one among them; 0 for none.
        model: the native engine's own; another one reads what it needs.
        model_path: one of the user's loads its own weights from here.

    Raises:
        TreegraftError: it cannot be made.
    """
    engine = _build_engine(config, model, tokenizer, model_path, num_ranks)
    try:
        if config.engine.kind == "vllm":
            await cast(Any, engine).open()
        yield engine
    finally:
        await engine.close()


def _build_engine(
    config: Config, model: Any, tokenizer: Tokenizer, model_path: Path | str, num_ranks: int
) -> Engine:
    kind = config.engine.kind
    if kind == "native":
        from treegraft.policy.engine.native import NativeEngine

        return NativeEngine(
            model, tokenizer, config.engine, reserved_bytes(config, model, num_ranks)
        )
    if kind == "vllm":
        served: Engine = load_object(f"{_VLLM}:build_engine")(config, model, tokenizer, model_path)
        return served
    engine: Engine = make(
        find(kind, {"native": None, "vllm": None}, "engine", "engine.kind"),
        Engine,
        kind,
        "engine.kind",
        tokenizer=tokenizer,
        settings=config.engine,
        model_path=str(model_path),
    )
    return engine


def reserved_bytes(config: Config, model: Any, num_ranks: int) -> float:
    """Returns what is still to be taken of a GPU that holds the model already: by a learner of so
    many ranks, and by the driver."""
    if not num_ranks:
        return ModelShape.RESERVED
    parts = ModelShape.of_model(model).learner_parts(config, num_ranks)
    # A single rank learns the weights that are there.
    return sum(parts.values()) - (parts.get("weights", 0.0) if num_ranks == 1 else 0.0)
