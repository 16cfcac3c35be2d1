"""Which optional packages the settings of a run need."""

from __future__ import annotations

from collections.abc import Iterator

from treegraft.core.packages import lacking
from treegraft.core.registry import extensions
from treegraft.settings.config import Config
from treegraft.settings.explore import retrieving


def _wanted(config: Config) -> Iterator[tuple[bool, str, str]]:
    """Whether a recipe uses something that needs packages, what, and the modules it needs."""
    data = config.tasks.dataset
    for spec in (*data.train, *data.eval) if config.tasks.kind == "dataset" else ():
        yield spec.startswith("hub:"), f"the data set '{spec}'", "datasets"
        yield spec.lower().endswith(".parquet"), f"reading '{spec}'", "pyarrow"
    yield "math" in (config.reward.accuracy, *config.reward.funcs), "reward 'math'", "math_verify"
    encoder = config.buffer.encoder
    is_model = bool(retrieving(config.explore.explorers)) and encoder != "hashing"
    yield is_model, f"buffer.encoder = '{encoder}'", "sentence_transformers"
    for entry in extensions().entries:
        if needs := entry.brings.get("needs"):
            for what, modules in needs(config):
                yield True, what, modules


def missing_packages(config: Config) -> dict[str, str]:
    """Returns, for each thing that a recipe uses and that lacks a package, the sentence that
    says so."""
    missing: dict[str, str] = {}
    for is_on, what, names in _wanted(config):
        if is_on and (text := lacking(what, *names.split())):
            missing[what] = text
    return missing
