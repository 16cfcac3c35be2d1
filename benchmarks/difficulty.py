"""How well rates of reference tasks tell those of the others (sampler.num_references), on
questions of the demo's kind.

    python benchmarks/difficulty.py

600 questions of 1, 3, 4 and 5 searches have success rates of .95, .3, .1 and .02, set by hand; a
reference's label is that of 16 draws. Means over 20 reference sets: the correlation of predicted
and true rates over the other questions, and the mean error, beside that of the references' mean.
"""

from __future__ import annotations

import numpy as np

from treegraft.extras.methods.dots.sampler import ATTENTION_TEMPERATURE, predicted_rates
from treegraft.settings.tasks import SearchWorldSettings
from treegraft.tasks.search_world import SearchWorld
from treegraft.tools.search.encoders import build_encoder

RATES = {1: 0.95, 3: 0.3, 4: 0.1, 5: 0.02}
NUM_TASKS = 600
NUM_SETS = 20
NUM_LEAVES = 16


def main() -> None:
    world = SearchWorld(
        SearchWorldSettings(hops=list(RATES)), seed=0, num_train=NUM_TASKS, num_eval=1
    )
    tasks = world.train_tasks()
    vectors = build_encoder("hashing").encode([one.question for one in tasks]).astype(np.float64)
    true = np.array([RATES[one.columns["hops"]] for one in tasks])
    draw = np.random.default_rng(0)
    print("references  correlation  error  error of the mean")
    for num in (6, 12, 48, 256):
        found = []
        for _ in range(NUM_SETS):
            chosen = draw.choice(NUM_TASKS, num, replace=False)
            labels = draw.binomial(NUM_LEAVES, true[chosen]) / NUM_LEAVES
            rates = predicted_rates(
                vectors,
                chosen.tolist(),
                labels,
                np.full(num, float(NUM_LEAVES)),
                ATTENTION_TEMPERATURE,
            )
            others = np.setdiff1d(np.arange(NUM_TASKS), chosen)
            error = np.abs(rates - true)[others].mean()
            flat = np.abs(labels.mean() - true)[others].mean()
            found.append((np.corrcoef(rates[others], true[others])[0, 1], error, flat))
        print("{:10d}  {:11.2f}  {:5.2f}  {:17.2f}".format(num, *np.mean(found, axis=0)))


if __name__ == "__main__":
    main()
