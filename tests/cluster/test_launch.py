"""The examples for SLURM and Kubernetes: their files are run or read as far as that goes without
either, and their commands are those that our command line takes."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from treegraft.settings.config import Config
from treegraft.settings.load import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
STUB = """#!/bin/bash
echo "{name} $*" >> "$STUBS/calls"
"""
STUBS = {
    # Runs what stands behind its options.
    "srun": 'echo "${SRUN_CPUS_PER_TASK:-1}" >> "$STUBS/cores"\n'
    'while [[ $1 == --* ]]; do shift; done\n"$@"\n',
    "hostname": 'echo "10.0.0.7 fe80::1"\n',
    "scontrol": '[[ $1 == show ]] && printf "node1\\nnode2\\n" || true\n',
    "ray": '[[ $1 == status ]] && printf " 1 node_a\\n 1 node_b\\n" && exit 0\nexec sleep 60\n',
    # As the command: SIGUSR1 ends it with 138, in its own time.
    "treegraft": 'trap "sleep 0.2; exit 138" USR1\nwhile true; do sleep 0.1; done\n',
}


def config_of(arguments: list[str]) -> Config:
    """The settings of a `treegraft cluster` command; a recipe of its own stands for all."""
    assert arguments[:2] == ["treegraft", "cluster"]
    rest = arguments[2:]
    given = rest[2:] if rest[0] == "--resume" else rest[1:]
    return load_config("demo", given)


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The environment of a batch script, with stubs in place of SLURM, Ray and the command."""
    for name, body in STUBS.items():
        path = tmp_path / name
        path.write_text(STUB.format(name=name) + body, encoding="utf-8")
        path.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "STUBS": str(tmp_path),
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "64",
    }


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


@pytest.mark.parametrize("is_there", [False, True])
def test_the_batch_script_starts_a_cluster_and_is_queued_again(
    slurm: Mapping[str, str], tmp_path: Path, is_there: bool
) -> None:
    if is_there:
        (tmp_path / "runs" / "mine").mkdir(parents=True)
        (tmp_path / "runs" / "mine" / "config.json").touch()
    job = subprocess.Popen(
        ["bash", str(FOLDER / "slurm.sbatch"), "recipes/demo.toml", "mine"], cwd=tmp_path, env=slurm
    )
    deadline = time.monotonic() + 60.0
    while not any(call.startswith("treegraft") for call in calls(tmp_path)):
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)
    # Its traps are set by the next line.
    time.sleep(0.5)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 138
    found = calls(tmp_path)
    (asked,) = (shlex.split(call) for call in found if call.startswith("treegraft"))
    begin = ["--resume", "runs/mine"] if is_there else ["recipes/demo.toml", "run.name=mine"]
    assert asked[2:4] == begin
    config = config_of(asked)
    assert config.cluster.address == "10.0.0.7:21234"
    assert (config.learn.ranks, config.cluster.server_gpus) == (8, 8)
    started = [call for call in found if call.startswith("ray start")]
    assert len(started) == 2 and all("--block" in call for call in started)
    assert any("--head --node-ip-address=10.0.0.7 --port=21234" in call for call in started)
    assert any("--address=10.0.0.7:21234 --num-gpus=8" in call for call in started)
    # The ranks of the learner have the GPUs of the command's machine.
    assert any("--include-dashboard=false --num-gpus=0" in call for call in started)
    # Since Slurm 22.05 a step has one core unless it is told otherwise.
    assert {*(tmp_path / "cores").read_text(encoding="utf-8").split()} == {"64"}
    assert found[-1] == "scontrol requeue 41234"


def test_the_batch_script_asks_for_the_machines_that_its_command_takes() -> None:
    text = (FOLDER / "slurm.sbatch").read_text(encoding="utf-8")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
    # Of sbatch's manual.
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"}
    assert asked.keys() <= known | {"signal", "requeue", "open-mode", "output"}
    assert int(asked["nodes"]) * int(asked["gpus-per-node"]) == 16
    assert f"gpus_per_node={asked['gpus-per-node']}\n" in text
    assert asked["signal"] == "B:USR1@600" and asked["ntasks-per-node"] == "1"


def test_the_ray_job_starts_a_run_whose_pods_share_its_folder() -> None:
    found = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (found["apiVersion"], found["kind"]) == ("ray.io/v1", "RayJob")
    spec = found["spec"]
    head, (workers,) = (
        spec["rayClusterSpec"]["headGroupSpec"],
        spec["rayClusterSpec"]["workerGroupSpecs"],
    )
    for group in (head, workers):
        pod = group["template"]["spec"]
        volumes = {one["name"] for one in pod["volumes"]}
        (container,) = pod["containers"]
        assert {one["name"] for one in container["volumeMounts"]} == volumes
        # The run folder is the same for all.
        assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
    # Of 32B in bfloat16 two copies, beside Ray's object store.
    (memory,) = (
        one["emptyDir"] for one in workers["template"]["spec"]["volumes"] if "emptyDir" in one
    )
    room = int(memory["sizeLimit"].removesuffix("Gi")) * 2**30
    assert room > int(workers["rayStartParams"]["object-store-memory"]) + 2 * 66e9
    (container,) = workers["template"]["spec"]["containers"]
    num_gpus = workers["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    shell = shlex.split(spec["entrypoint"])
    assert shell[:2] == ["sh", "-c"] and len(shell) == 3
    subprocess.run(["sh", "-n", "-c", shell[2]], check=True)
    commands = re.findall(r"exec (treegraft cluster [^;]+);", shell[2])
    assert len(commands) == 2
    for command in commands:
        config = config_of(shlex.split(command))
        assert config.cluster.address == "auto"
        # One copy a machine: eight engines would write eight.
        assert config.cluster.engines == config.cluster.server_gpus // 8
        assert config.cluster.server_gpus == num_gpus
