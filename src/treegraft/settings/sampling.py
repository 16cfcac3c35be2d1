"""Settings of replay and of encoders that do not fit others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from treegraft.core.errors import nearest
from treegraft.settings.table import Contradiction


def unknown_encoder(name: str, encoder: str) -> Iterator[Contradiction]:
    """Yields a fault where `encoder`, the value of the setting `name`, can be none."""
    # A folder or hub id has one of these signs; a plain word is a misspelt name.
    if encoder not in ("hashing", "minilm") and not any(sign in encoder for sign in "/:~."):
        yield Contradiction(
            (name,),
            f'{name}: got \'{encoder}\', expected "minilm", "hashing", a folder, a hub id, or'
            f' "pypi:PACKAGE".{nearest(encoder, ("hashing", "minilm"))}',
        )


def sampling_wrong(config: Any) -> Iterator[Contradiction]:
    """Yields the faults of [replay]."""
    if config.replay.fresh_frac == 1:
        return
    size = config.run.tasks_per_update
    if config.replay.num_replayed(size) == 0:
        yield Contradiction(
            ("replay.fresh_frac", "run.tasks_per_update"),
            f"replay.fresh_frac: got {config.replay.fresh_frac:g}, which leaves no group to replay"
            f" with run.tasks_per_update = {size}; expected 1 for none, a smaller share, or more"
            " tasks.",
        )
    if not config.track.record_trees:
        yield Contradiction(
            ("replay.fresh_frac", "track.record_trees"),
            "replay.fresh_frac: groups are replayed from the run's trees, which are not written"
            " with track.record_trees = false; set that to true, or replay.fresh_frac to 1.",
        )
    if config.track.keep_trees is not None:
        yield Contradiction(
            ("track.keep_trees", "replay.fresh_frac"),
            f"track.keep_trees: got {config.track.keep_trees}, but groups of any earlier update may"
            " be replayed from the run's trees; leave it out, or set replay.fresh_frac to 1.",
        )
    if config.loss.old_logprobs == "learner" and config.loss.engine_ratio_cap is None:
        yield Contradiction(
            ("replay.fresh_frac", "loss.engine_ratio_cap"),
            "replay.fresh_frac: replayed groups were sampled by an older policy, which needs the"
            " ratio to it; set loss.engine_ratio_cap (1e9 for RolloutReplay's loss, which has no"
            ' cap), or loss.old_logprobs = "engine".',
        )
