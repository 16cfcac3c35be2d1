"""GRPO in a loop of your own, down to its loss; weights and metrics are those of `train` with the
same settings, bit for bit.

python examples/loops/grpo.py

Shapes: U sampled tokens of all trees, each once; C contributions, one for each trajectory that
holds such a token; N trajectories.
"""

import tempfile
from pathlib import Path

from treegraft import Config, Session, Tree, load_config, pack_trees, sft
from treegraft.parts import Learner, losses

SETTINGS = ["run.num_updates=3", "warmup.num_steps=0", "learn.num_minibatches=1"]


def learn(learner: Learner, trees: list[Tree], config: Config) -> dict[str, float]:
    """One optimiser step on the trees of an update; returns its metrics."""
    # Groups without variance teach nothing, and count in the denominator all the same.
    batch = pack_trees([tree for tree in trees if any(leaf.advantage for leaf in tree.leaves)])
    rows = batch.carries_loss.nonzero()[:, 0]  # [C] contributions with loss
    tokens = batch.tokens[rows]
    owners = batch.trajectories[rows]  # [C] of U, [C] of N
    logprobs = learner.scores(batch)[0]  # [U]
    new = logprobs.index_select(0, tokens)
    columns = (new, new.detach(), batch.advantages[rows])  # [C] each
    low = config.loss.clip_low
    high = config.loss.clip_high
    terms = losses.clipped_surrogate(*columns, clip_low=low, clip_high=high)
    weights = batch.lengths.new_tensor([path.leaf.weight for path in batch.paths])  # [N]
    whole = losses.Denominators(num_groups=len(trees), weighted_tokens=0.0, length_constant=1.0)
    factors = losses.contribution_weights(weights, batch.lengths, whole, "sequence-mean").float()
    loss = (factors[owners] * terms.losses).sum()
    loss.backward()
    return {"learn/loss": float(loss.detach()), "learn/grad_norm": learner.optimiser.step()}


def loop(config: Config, folder: Path) -> list[dict[str, float]]:
    """Makes all updates, writes a checkpoint to `folder` and returns the metrics of each."""
    metrics = []
    with Session(config) as session:
        for update in range(session.update + 1, config.run.num_updates + 1):
            trees = session.sample(update)
            trees = session.credit(trees)
            learned = learn(session.learner, trees, config)
            session.sync_weights(update)
            metrics.append(session.pop_metrics() | learned)
        session.save(folder)
    return metrics


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    start = sft(load_config("demo", [f"run.dir={place}", "warmup.num_steps=100"])).checkpoint_dir
    for line in loop(load_config("demo", [*SETTINGS, f"model.path={start}"]), place / "agent"):
        print(f"reward {line['reward/mean']:.3f}, gradient {line['learn/grad_norm']:.3f}")
