"""RAPO in a loop of your own: steps of an expert are grafted onto trajectories, from a Step-Trace
Buffer in memory, to which each update adds the agent's own best trajectories. Weights and metrics
are those of `train` with the same settings, bit for bit.

python examples/loops/rapo.py

Advantages join outcome and retrieval reward (eq. 10). The ratios [C] of a trajectory of which the
share F was grafted are multiplied by 1 + m F before the clip (eq. 8 and 11).
"""

import tempfile
from pathlib import Path

from treegraft import Config, Session, load_config, sft

SETTINGS = ["run.num_updates=3", "warmup.num_steps=0", 'explore.explorers=["graft"]']
SETTINGS += ["buffer.grow.num_best=1", "learn.num_minibatches=2"]


def loop(config: Config, folder: Path) -> list[dict[str, float]]:
    """Makes all updates, writes a checkpoint to `folder` and returns the metrics of each."""
    metrics = []
    with Session(config) as session:
        for update in range(session.update + 1, config.run.num_updates + 1):
            trees = session.sample(update)
            trees = session.credit(trees)
            session.learn(trees, update)  # which also fills the buffer
            session.sync_weights(update)
            metrics.append(session.pop_metrics())
        session.save(folder)
    return metrics


if __name__ == "__main__":
    place = Path(tempfile.mkdtemp())
    start = sft(load_config("demo", [f"run.dir={place}", "warmup.num_steps=100"])).checkpoint_dir
    for line in loop(load_config("demo", [*SETTINGS, f"model.path={start}"]), place / "agent"):
        grafted = line["rollout/retrieved_frac"]
        traces = line["buffer/num_traces"]
        print(f"reward {line['reward/mean']:.3f}, {grafted:.3f} grafted, {traces:.0f} traces")
