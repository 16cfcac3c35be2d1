"""ARPO in a loop of your own: trees branch where the agent is unsure, and a step learns with the
mean advantage of the leaves below it. Weights and metrics are those of `train` with the same
settings, bit for bit.

python examples/loops/arpo.py

`learn` makes the optimiser steps, here two of them: it packs the trees, so that each of U unique
tokens is scored once, and sums the loss over the C tokens of all trajectories.
"""

import tempfile
from pathlib import Path

from treegraft import Config, Session, load_config, sft
from treegraft.parts import LeafRow, leaf_rows

SETTINGS = ["run.num_updates=3", "warmup.num_steps=0", 'explore.explorers=["entropy"]']
SETTINGS += ["credit.attribution=hard", "learn.num_minibatches=2"]


def loop(config: Config, folder: Path) -> list[dict[str, float]]:
    """Makes all updates, writes a checkpoint to `folder` and returns the metrics of each."""
    metrics = []
    with Session(config) as session:
        for update in range(session.update + 1, config.run.num_updates + 1):
            trees = session.sample(update)
            trees = session.credit(trees)
            trees = session.learn(trees, update)
            session.sync_weights(update)
            metrics.append(session.pop_metrics())
            # What another trainer would get: a row for each leaf, with the advantage of each token.
            rows = leaf_rows(trees, config)
            print(f"update {update}: {len(trees)} trees, {len(rows)} rows, {show(rows[0])}")
        session.save(folder)
    return metrics


def show(row: LeafRow) -> str:
    """The different advantages on one row: more than one where its tree has branched."""
    own = [a for a, has_loss in zip(row.advantages, row.loss_mask, strict=True) if has_loss]
    return f"the first with advantages {sorted({round(one, 3) for one in own})}"


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    start = sft(load_config("demo", [f"run.dir={place}", "warmup.num_steps=100"])).checkpoint_dir
    for line in loop(load_config("demo", [*SETTINGS, f"model.path={start}"]), place / "agent"):
        print(f"reward {line['reward/mean']:.3f}, {line['branch/num_branches']:.0f} branches")
