"""A whole update - sample a group, reward, credit, learn, publish - against TRL's GRPOTrainer, and
our methods against each other.

Both sides have the same model and dtype, the prompt of 200 tokens, the number of completions and
their length (end tokens are ignored), one optimiser step, no KL term. TRL's child process times
itself from "go" to the end of its optimiser step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.measure import Case, Row, Side, alternate, time_row
from benchmarks.speed.methods import method_cases
from benchmarks.speed.peers import ScriptPeer, missing, peer_python
from benchmarks.speed.stage import OurEngine, Stage
from treegraft import load_config
from treegraft.core.errors import EngineError
from treegraft.core.interfaces import WeightSource
from treegraft.core.types import Completion, Leaf, Origin, Status, Step, Task, Tree
from treegraft.policy.learn.credit import credit_trees
from treegraft.policy.learn.learner import Learner
from treegraft.settings.policy import LearnSettings, LossSettings

PROMPT = 200
GROUP = 16
LENGTHS = (64, 256)
LR = 1e-6
_WORDS = "river king stone light water paper music garden winter bridge"


def cases(stage: Stage) -> Mapping[str, Case]:
    """Returns the parts of `python -m benchmarks.speed whole`."""
    found: dict[str, Case] = {
        f"trl {num}": partial(_against_trl, stage, num) for num in stage.pick(LENGTHS, (8,))
    }
    return {**found, **method_cases(stage)}


def _against_trl(stage: Stage, num_tokens: int) -> Iterator[Row]:
    group = stage.pick(GROUP, 4)
    text, prompt = _prompt(stage)
    python = peer_python("trl", stage.trl_python)
    with ExitStack() as stack:
        ours = _Update(stage, stack.enter_context(stage.engine()))
        sides = {"ours": Side(lambda run: ours(prompt, group, num_tokens, run))}
        said: list[float] = []
        if python is None:
            stage.note(missing("trl"))
        else:
            peer = _trl(stage, python, text, len(prompt), group, num_tokens)
            stack.callback(peer.close)

            def after(run: int, answer: Mapping[str, Any]) -> None:
                if answer["num_completion_tokens"] != group * num_tokens:
                    got = answer["num_completion_tokens"]
                    raise EngineError(
                        f"peer trl: it sampled {got} tokens; expected {group * num_tokens}"
                    )
                said.append(answer["seconds"])

            sides["trl"] = Side(lambda _: peer.ask(go=True), after=after)
        seconds = alternate(sides, stage.num_runs)
        gap = ours.engine.worst_gap
        stage.say(
            f"   ours samples {ours.sampled_frac:.0%} of its time; log-probabilities differ by"
            f" {gap:.4f} nats in the mean"
        )
    what = f"whole update, {group} x {num_tokens} tokens, {len(prompt)}-token prompt"
    if python is not None:
        yield time_row(what, "TRL GRPOTrainer (transformers generation)", seconds["ours"], said[1:])


def _prompt(stage: Stage) -> tuple[str, list[int]]:
    """Returns a text of exactly so many tokens, and them."""
    _, tokenizer = stage.load()
    wanted = stage.pick(PROMPT, 20)
    words = ["w1", "w2", "w3"] if stage.is_quick else _WORDS.split()
    text = ""
    for number in range(wanted):
        text = f"{text} {words[number % len(words)]}".strip()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == wanted, f"the prompt has {len(ids)} tokens, expected {wanted}"
    return text, list(ids)


def _trl(
    stage: Stage, python: Path, text: str, num_prompt: int, group: int, num_tokens: int
) -> ScriptPeer:
    settings = {
        "model": str(stage.saved_model),
        "prompt": text,
        "num_generations": group,
        "num_tokens": num_tokens,
        "dtype": stage.dtype,
        "num_threads": stage.threads,
        "lr": LR,
        "folder": str(stage.folder / "trl"),
    }
    stage.say(f"starting TRL (its output: {stage.folder / 'trl.log'})")
    peer = ScriptPeer(
        "trl", python, Path(__file__).with_name("trl_peer.py"), settings, stage.folder
    )
    if peer.ready["num_prompt_tokens"] != num_prompt:
        peer.close()
        raise EngineError(
            f"peer trl: its prompt has {peer.ready['num_prompt_tokens']} tokens; expected"
            f" {num_prompt}"
        )
    return peer


# ---------------------------------------------------------------------- ours


class _Update:
    """Everything between two updates of the policy: sample, reward, credit, learn, publish."""

    def __init__(self, stage: Stage, engine: OurEngine) -> None:
        self.engine = engine
        learn = LearnSettings(lr=LR, max_grad_norm=1.0)
        self._learner = Learner(stage.load()[0], learn, LossSettings(), length_constant=256)
        self._config = load_config({})
        self._sampled_s = self._all_s = 0.0

    @property
    def sampled_frac(self) -> float:
        """Share of the time that sampling took."""
        return self._sampled_s / max(1e-9, self._all_s)

    def __call__(self, prompt: Sequence[int], group: int, num_tokens: int, run: int) -> None:
        began = time.perf_counter()
        completions = self.engine.group(prompt, group, num_tokens, run)
        sampled = time.perf_counter()
        tree = group_tree(
            prompt, completions, [float(sum(one.token_ids) % 7) for one in completions]
        )
        self._learner.learn(credit_trees([tree], self._config))
        weights = self._learner.weights()
        self.engine.runner.run(self._publish(weights, run + 1))
        self._sampled_s += sampled - began
        self._all_s += time.perf_counter() - began
        counts = [len(one.token_ids) for one in completions]
        if counts != [num_tokens] * group:
            raise EngineError(
                f"benchmark: completions have {counts} tokens; expected {num_tokens} each"
            )
        if run == 0:  # by the weights that the reference has
            self.engine.check(prompt, completions, num_tokens)

    async def _publish(self, weights: WeightSource, version: int) -> None:
        await asyncio.sleep(0)
        await self.engine.engine.publish(weights, version)


def group_tree(
    prompt: Sequence[int], completions: Sequence[Completion], rewards: Sequence[float]
) -> Tree:
    """Returns the tree of a group: a prompt and one step for each completion."""

    def step(step_id: str, ids: Sequence[int], completion: Completion | None) -> Step:
        zeros = np.zeros(len(ids))
        is_own = completion is not None
        return Step(
            id=step_id,
            parent="0" if is_own else None,
            depth=int(is_own),
            token_ids=np.array(ids),
            origins=np.full(len(ids), Origin.POLICY if is_own else Origin.PROMPT),
            loss_mask=np.full(len(ids), is_own),
            sampling_logprobs=np.array(completion.sampling_logprobs) if completion else zeros,
            entropies=np.array(completion.entropies) if completion else zeros,
        )

    steps = [
        step("0", prompt, None),
        *(step(f"0.{n}", one.token_ids, one) for n, one in enumerate(completions)),
    ]
    leaves = [
        Leaf(step_id=f"0.{n}", status=Status.COMPLETED, reward=reward, weight=1 / len(rewards))
        for n, reward in enumerate(rewards)
    ]
    return Tree(
        task=Task(id="bench", question="", reference=()),
        group_id="bench",
        steps=tuple(steps),
        leaves=tuple(leaves),
    )
