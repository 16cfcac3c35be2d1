"""The engine "vllm" against servers of ours that answer as vLLM does: the same tokens whatever
dies, and no reply by other weights."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from tests.support.error_codes import raises_code
from tests.support.fake_vllm import FakeVllm, fakes
from tests.support.families import build_model, word_tokenizer
from tests.support.tiny import tiny

from treegraft.core.errors import EngineError
from treegraft.core.interfaces import Request
from treegraft.core.types import Completion, EntropyKind, Filters, Sampling
from treegraft.policy.engine.vllm import launch
from treegraft.policy.engine.vllm.build import (
    SHARED_MEMORY,
    _environment,
    _folder_for_weights,
    build_engine,
    client,
    find_python,
    options,
)
from treegraft.policy.engine.vllm.engine import VllmEngine
from treegraft.policy.engine.vllm.folder import read_folder, write_folder
from treegraft.policy.engine.vllm.replies import read_reply
from treegraft.policy.engine.vllm.server import Process, Server
from treegraft.policy.weights import ModelWeights, weights_fingerprint
from treegraft.settings.config import Config
from treegraft.settings.load import load_config

MODEL = build_model("llama", 0)
OTHER = build_model("llama", 1)
PREFIX = (1, 5, 9, 4)
LONG = Sampling(max_new_tokens=12)
Work = Callable[[VllmEngine], Awaitable[Any]]


def config_of(fakes: list[FakeVllm], folder: Path, **vllm: Any) -> Config:
    engine = {"kind": "vllm", "max_rows": 4, "deadline_s": 20.0}
    engine |= {name: vllm.pop(name) for name in ("max_rows", "deadline_s") if name in vllm}
    vllm = {"servers": [one.url for one in fakes]} | vllm
    return load_config(tiny(run={"dir": str(folder)}, engine={**engine, "vllm": vllm}))


def run(fakes: list[FakeVllm], folder: Path, work: Work, **vllm: Any) -> Any:
    model = vllm.pop("start_with", MODEL)
    config = config_of(fakes, folder, **vllm)

    async def main() -> Any:
        engine = build_engine(config, copy.deepcopy(model), word_tokenizer(), "tiny")
        try:
            await engine.open()
            return await asyncio.wait_for(work(engine), 40.0)
        finally:
            await engine.close()

    return asyncio.run(main())


def key(number: int) -> tuple[int | str, ...]:
    """Of the only step of a tree of its own."""
    return (0, "train", 1, f"t{number}", "0")


async def ask(engine: Any, number: int, sampling: Sampling = LONG) -> Completion:
    return await engine.complete(Request(PREFIX, sampling, noise_key=key(number)))


def undisturbed(
    model: Any, folder: Path, numbers: range, sampling: Sampling = LONG
) -> list[Completion]:
    """What one server of that model writes for the same keys."""

    async def work(engine: VllmEngine) -> list[Completion]:
        return await asyncio.gather(*(ask(engine, one, sampling) for one in numbers))

    with fakes(model) as servers:
        found: list[Completion] = run(servers, folder, work, start_with=model)
    return found


def same(found: list[Completion], expected: list[Completion]) -> bool:
    """Whether tokens and ends are equal, and numbers within rounding."""
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        for ours, theirs in (
            (one.sampling_logprobs, other.sampling_logprobs),
            (one.entropies, other.entropies),
        ):
            assert torch.allclose(torch.tensor(ours), torch.tensor(theirs), atol=1e-5)
    return True


def test_a_probe_comes_after_its_tokens(tmp_path: Path) -> None:
    seen: list[tuple[float, ...]] = []

    async def work(engine: VllmEngine) -> Completion:
        request = Request(PREFIX, LONG, key(0), probe_tokens=3, on_probe=seen.append)
        return await engine.complete(request)

    with fakes(MODEL) as servers:
        found = run(servers, tmp_path, work)
        assert servers[0].num_requests == 2
    assert len(found.token_ids) == 12 and seen == [found.entropies[:3]]


def test_dead_servers_requests_move_and_nothing_changes(tmp_path: Path) -> None:
    """One of two dies in mid-rollout; a request that fails twice is asked again."""

    async def work(engine: VllmEngine) -> list[Completion]:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        asked = [asyncio.create_task(ask(engine, one)) for one in range(8)]
        while not servers[1].num_running:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(servers[1].die)
        found = await asyncio.gather(*asked)
        assert engine.capacity == 4
        servers[0].token_s = 0.0
        servers[0].fail_next = 2
        found.append(await ask(engine, 8))
        servers[0].fail_next = 1000
        with raises_code("request-failed-often"):
            await ask(engine, 9)
        return found

    with fakes(MODEL, 2, token_s=0.02) as servers:
        found = run(servers, tmp_path, work)
    assert {one.policy_version for one in found} == {1}
    assert same(found, undisturbed(OTHER, tmp_path, range(9)))


def test_no_reply_by_other_weights_is_taken(tmp_path: Path) -> None:
    """Somebody starts one of two servers anew between two requests, or publishes to it."""

    async def work(engine: VllmEngine) -> list[Completion]:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        first = await ask(engine, 0)
        servers[0].model.load_state_dict(MODEL.state_dict())
        servers[0].label = "default"
        later = await asyncio.gather(*(ask(engine, one) for one in range(1, 5)))
        assert engine.capacity == 4
        return [first, *later]

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work)
    assert same(found, undisturbed(OTHER, tmp_path, range(5)))


def test_a_publish_waits_for_completions_and_holds_new_ones_back(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> tuple[list[Completion], list[Completion]]:
        before = [asyncio.create_task(ask(engine, one)) for one in range(4)]
        while servers[0].num_running < 4:
            await asyncio.sleep(0.005)
        publishing = asyncio.create_task(engine.publish(ModelWeights(OTHER.state_dict()), 1))
        await asyncio.sleep(0)
        after = [asyncio.create_task(ask(engine, one)) for one in range(4, 8)]
        await publishing
        assert engine.fingerprint == weights_fingerprint(OTHER.state_dict())
        return await asyncio.gather(*before), await asyncio.gather(*after)

    with fakes(MODEL, token_s=0.01) as servers:
        before, after = run(servers, tmp_path, work)
    assert {one.policy_version for one in before} == {0}
    assert {one.policy_version for one in after} == {1}
    assert same(before, undisturbed(MODEL, tmp_path, range(4)))
    assert same(after, undisturbed(OTHER, tmp_path, range(4, 8)))


def test_a_server_gets_no_more_requests_than_it_has_rows(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> int:
        assert engine.capacity == 8
        await asyncio.gather(*(ask(engine, one) for one in range(20)))
        return max(one.most_at_once for one in servers)

    with fakes(MODEL, 2, token_s=0.002) as servers:
        assert run(servers, tmp_path, work) == 4


def test_requests_of_a_tree_go_to_one_server(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> list[int]:
        for number in range(2):
            await asyncio.gather(
                *(
                    engine.complete(
                        Request(PREFIX, LONG, noise_key=(0, "train", 1, f"t{number}", str(n)))
                    )
                    for n in range(3)
                )
            )
        return sorted(one.num_requests for one in servers)

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work)
    assert sum(found) == 6 and found[0] in (0, 3)


def test_a_server_that_hangs_is_late_and_found_by_the_next_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("treegraft.policy.engine.vllm.servers.READY_S", 1.0)

    async def work(engine: VllmEngine) -> Completion:
        await ask(engine, 0)
        (home,) = [one for one in servers if one.num_requests]
        home.hangs = True
        # Another step of the same tree goes to the same server.
        with raises_code("engine-late"):
            await engine.complete(Request(PREFIX, LONG, (*key(0)[:-1], "1")))
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        assert engine.capacity == 4
        home.hangs = False
        return await ask(engine, 0)

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work, deadline_s=1.0)
    assert same([found], undisturbed(OTHER, tmp_path, range(1)))


def test_a_server_that_keeps_its_old_weights_is_left_out(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> list[Completion]:
        servers[1].skip_loads = True
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        assert engine.capacity == 4
        return await asyncio.gather(*(ask(engine, n) for n in range(6)))

    with fakes(MODEL, 2) as servers:
        found = run(servers, tmp_path, work)
    assert same(found, undisturbed(OTHER, tmp_path, range(6)))


def test_without_a_server_left_the_engine_has_died(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        await asyncio.to_thread(servers[0].die)
        with raises_code("no-server-left"):
            await ask(engine, 0)
        assert isinstance(engine.death, EngineError)

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)


def test_an_answer_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegraft.policy.engine.vllm.server.ANSWER_BYTES", 40_000)

    async def work(engine: VllmEngine) -> None:
        servers[0].padding = 20_000
        await ask(engine, 0)
        servers[0].padding = 50_000
        with raises_code("request-failed-often"):
            await ask(engine, 0)

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        await engine.publish(ModelWeights(OTHER.state_dict()), 1)
        # The former folder goes once all servers have read the new one.
        assert len([*engine._weights.iterdir()]) == 1

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ draws and entropies


def scored(model: Any, one: Completion, temperature: float = 1.0) -> torch.Tensor:
    """The model's log-probabilities at the tokens of a completion."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*PREFIX, *one.token_ids]])).logits[0, len(PREFIX) - 1 : -1]
    logprobs: torch.Tensor = (logits / (temperature or 1.0)).log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor(one.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(one.sampling_logprobs), own, atol=1e-5)
    return logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_entropies_are_those_of_the_likely_tokens(tmp_path: Path, temperature: float) -> None:
    """Log-probabilities and sums over the likeliest tokens are those of the model; the same key
    gives the same tokens on another server."""
    sampling = Sampling(max_new_tokens=6, temperature=temperature)

    async def work(engine: VllmEngine) -> tuple[list[Completion], list[Completion]]:
        first = await asyncio.gather(*(ask(engine, one, sampling) for one in range(8)))
        await asyncio.to_thread(servers[0].die)
        again = await asyncio.gather(*(ask(engine, one, sampling) for one in range(8)))
        return first, again

    with fakes(MODEL, 2) as servers:
        first, again = run(servers, tmp_path, work)
    assert same(first, again)
    assert (len({one.token_ids for one in first}) > 4) == (temperature > 0)
    for one in first:
        assert one.entropy_kind is EntropyKind.TOP_K
        logprobs = scored(MODEL, one, temperature)
        likely = logprobs.topk(19).values
        partial = -(likely.exp() * likely).sum(dim=1)
        assert torch.allclose(torch.tensor(one.entropies), partial, atol=1e-5)


def test_measured_entropies_are_exact(tmp_path: Path) -> None:
    """The tokens are those of "top_k"."""

    async def work(engine: VllmEngine) -> list[Completion]:
        return await asyncio.gather(*(ask(engine, one) for one in range(4)))

    with fakes(MODEL, is_v2=True) as servers:
        found = run(servers, tmp_path, work, entropies="measured")
        assert servers[0].measures
    for one, other in zip(found, undisturbed(MODEL, tmp_path, range(4)), strict=True):
        assert (one.token_ids, one.sampling_logprobs) == (other.token_ids, other.sampling_logprobs)
        assert one.entropy_kind is EntropyKind.EXACT
        logprobs = scored(MODEL, one)
        exact = -(logprobs.exp() * logprobs).sum(dim=1)
        assert torch.allclose(torch.tensor(one.entropies), exact, atol=1e-5)


def test_only_the_v2_runner_measures(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that cannot measure")

    with fakes(MODEL) as servers, raises_code("server-unfit"):
        run(servers, tmp_path, work, entropies="measured")
    config = load_config(tiny(engine={"kind": "vllm", "vllm": {"entropies": "measured"}}))
    found = _environment(config.engine.vllm, "", tmp_path, tmp_path)
    assert found["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_a_reply_by_hand() -> None:
    """Four tokens, of which those of .5 and .3 are reported."""
    likely = [{"logprob": math.log(0.3)}, {"logprob": math.log(0.5)}]
    row = {"token_id": 3, "logprob": math.log(0.1), "top_logprobs": likely}
    choice = {"token_ids": [3], "logprobs": {"content": [row]}}
    ids, logprobs, entropies = read_reply(choice, EntropyKind.TOP_K)
    assert (ids, logprobs) == ([3], [math.log(0.1)])
    assert entropies == pytest.approx([0.5 * math.log(2) - 0.3 * math.log(0.3)])
    measured = read_reply(choice, EntropyKind.EXACT)
    assert measured == ([3], [math.log(0.1)], [math.log(0.5)])
    with pytest.raises(KeyError):
        read_reply({"token_ids": [3]}, EntropyKind.TOP_K)


def test_filters_are_asked_of_the_server(tmp_path: Path) -> None:
    """Of one token alone the draw is the greedy one, and certain."""
    found: list[Completion] = []

    async def work(engine: VllmEngine) -> None:
        for filters in (Filters(top_k=1), Filters(top_p=1e-6), Filters(repetition_penalty=1e6)):
            found.append(await ask(engine, 5, Sampling(max_new_tokens=6, filters=filters)))
        found.append(await ask(engine, 5, Sampling(max_new_tokens=6, temperature=0.0)))

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)
    greedy = found[-1].token_ids
    for one in found[:2]:
        assert one.token_ids == greedy and one.sampling_logprobs == (0.0,) * len(greedy)
    assert len({*found[2].token_ids}) == len(found[2].token_ids)  # none is drawn twice


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 7),
        ("model_type", "qwen2"),
        ("dtype", "bfloat16"),
        ("plugin", 0),
        ("max_context", 20),
        ("max_logprobs", 5),
        ("logprobs_mode", "raw_logprobs"),
    ],
)
def test_servers_that_do_not_fit_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that does not fit")

    with fakes(MODEL, **{field: value}) as servers, raises_code("server-unfit"):
        run(servers, tmp_path, work)


def test_a_server_without_the_plugin_is_refused_with_its_version(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("a server was taken that has no plugin")

    with fakes(MODEL) as servers:
        servers[0].has_plugin = False
        with raises_code("server-without-plugin"):
            run(servers, tmp_path, work)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "http://[a"])
def test_addresses_without_a_server_are_refused(tmp_path: Path, url: str) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("there is no server")

    with raises_code("server-not-there"):
        run([], tmp_path, work, servers=[url])


class Page(BaseHTTPRequestHandler):
    """Answers everything with a page, as a proxy or another program does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>hello</html>")

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_another_program_is_not_taken_for_a_server(tmp_path: Path) -> None:
    async def work(engine: VllmEngine) -> None:
        raise AssertionError("there is no server")

    with HTTPServer(("127.0.0.1", 0), Page) as pages:
        threading.Thread(target=pages.serve_forever, daemon=True).start()
        with raises_code("server-without-plugin"):
            run([], tmp_path, work, servers=[f"http://127.0.0.1:{pages.server_port}"])
        pages.shutdown()


def test_a_server_whose_log_cannot_be_written_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises_code("server-not-started"):
        Process(["true"], environment={}, log=tmp_path / "file" / "log").start()


def test_a_python_that_is_not_there_is_refused() -> None:
    config = load_config(tiny(engine={"kind": "vllm", "vllm": {"python": "/no/python"}}))
    with raises_code("vllm-python-missing", match="make vllm-env"):
        find_python(config.engine.vllm)


def test_servers_of_ours_do_not_join_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_torchrun = {
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_USE_AGENT_STORE",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
    }
    for name in of_torchrun:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("RANKING", "kept")
    settings = load_config(tiny()).engine.vllm
    found = _environment(settings, "2,3", tmp_path, tmp_path)
    assert found["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not of_torchrun & found.keys()
    assert found["RANKING"] == "kept" and "VLLM_USE_V2_MODEL_RUNNER" not in found


def test_servers_of_ours_are_reached_by_this_user_alone(tmp_path: Path) -> None:
    """They listen at a file in a folder of mode 700, never at a port."""
    words = options(load_config(tiny()), tmp_path / "http-0")
    assert words[words.index("--uds") + 1] == str(tmp_path / "http-0")
    assert not {"--host", "--port"} & {*words}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *_: object) -> None: ...

        def address_string(self) -> str:
            return ""

    class AtFile(ThreadingUnixStreamServer):
        def get_request(self) -> tuple[Any, Any]:
            return self.socket.accept()[0], ("", 0)

    paths = [tmp_path / f"http-{number}" for number in range(2)]
    servers = [AtFile(str(path), Answer) for path in paths]
    for one in servers:
        threading.Thread(target=one.serve_forever, daemon=True).start()

    async def ask() -> list[bool]:
        addresses = [f"http://server-{number}" for number in range(2)]
        http = client(dict(zip(addresses, paths, strict=True)))
        servers[1].shutdown()
        servers[1].server_close()
        paths[1].unlink()
        found = [await Server(address, http).is_healthy() for address in addresses]
        await http.aclose()
        return found

    try:
        assert asyncio.run(ask()) == [True, False]
    finally:
        servers[0].shutdown()
        servers[0].server_close()


# ------------------------------------------------------------------ weights and processes


def test_folders_of_weights_give_back_every_tensor_and_its_checksum(tmp_path: Path) -> None:
    weights = dict(MODEL.state_dict())
    weights["tied"] = weights["model.embed_tokens.weight"]
    num_bytes = write_folder(tmp_path / "weights", ModelWeights(weights))
    read = dict(read_folder(tmp_path / "weights"))
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)
    assert weights_fingerprint(read) == weights_fingerprint(weights)
    assert num_bytes == sum(one.nbytes for one in weights.values())


def test_weights_that_do_not_fit_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    async def work(engine: VllmEngine) -> None:
        monkeypatch.setattr("treegraft.policy.engine.vllm.folder.save_file", full)
        with raises_code("weights-not-written"):
            await engine.publish(ModelWeights(OTHER.state_dict()), 1)

    with fakes(MODEL) as servers:
        run(servers, tmp_path, work)


def test_where_weights_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory for servers of the run's own if two copies have room, else run.dir, or the
    folder of the recipe."""
    size = sum(one.nbytes for one in MODEL.state_dict().values())
    there = ["engine.vllm.servers=['http://127.0.0.1:9']"]
    chosen = [f"publish.folder={tmp_path / 'chosen'}"]
    for free, overrides, parent in (
        (2 * size + 1, [], SHARED_MEMORY),
        (2 * size, [], tmp_path),
        (2 * size + 1, there, tmp_path),
        (2 * size + 1, chosen, tmp_path / "chosen"),
    ):
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        config = load_config(tiny(engine={"kind": "vllm"}), overrides)
        folder = _folder_for_weights(config, MODEL, tmp_path)
        folder.rmdir()
        assert folder.parent == parent
    (tmp_path / "file").touch()
    config = load_config(config, [f"publish.folder={tmp_path / 'file'}"])
    with raises_code("publish-folder-unwritable"):
        _folder_for_weights(config, MODEL, tmp_path)


SERVER = """
import multiprocessing.shared_memory as m, os, signal, subprocess, sys, time
memory = m.SharedMemory(create=True, size=1000)
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print(memory.name, child.pid, os.getpid(), flush=True)
time.sleep(600)
"""
OWNER = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["owner", "server"])
def test_nothing_of_a_server_outlives_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """The run is killed, or the server: its child, which ignores SIGTERM, and its shared memory go
    too; the folders go with the run."""
    script = tmp_path / "launch.py"
    text = Path(launch.__file__).read_text().replace("GRACE_S = 8.0", "GRACE_S = 0.5")
    script.write_text(text)
    folder = tmp_path / "weights"
    folder.mkdir()
    log = (tmp_path / "log").open("w+")
    command = [sys.executable, str(script), json.dumps([str(folder)])]
    command += [sys.executable, "-c", textwrap.dedent(SERVER)]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, *command], stdout=log)
    try:
        while not (words := (tmp_path / "log").read_text().split()):
            time.sleep(0.05)
        name = words[0]
        child = int(words[1])
        server = int(words[2])
        os.kill(owner.pid if victim == "owner" else server, signal.SIGKILL)
        end = time.monotonic() + 20.0
        while Path(f"/proc/{child}").exists() or (SHARED_MEMORY / name).exists():
            assert time.monotonic() < end, "a process or its memory is left"
            time.sleep(0.05)
        if victim == "owner":
            while folder.exists():
                assert time.monotonic() < end, "the folder is left"
                time.sleep(0.05)
        assert folder.exists() == (victim == "server")
    finally:
        owner.kill()
        owner.wait()
        log.close()
