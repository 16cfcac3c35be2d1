"""Settings of the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
from collections.abc import Iterator

# One thread unless a test says otherwise: the models are tiny, and two threads that wait for each
# other on a busy machine take five times as long. Read by torch when it is imported, here and in
# the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where a test has several, they wait for each other asleep: spinning takes the cores of the other
# processes of the suite.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch.distributed as dist
from hypothesis import settings
from tests.support.examples import WHOLE
from tests.support.forked import not_waited_for
from tests.support.smollm2 import SHARED

# All processes of the suite know the runs that one of them has made, and the user's own list of
# what is trusted stays as it is.
_config = tempfile.TemporaryDirectory(prefix="treegraft-tests-")
os.environ["XDG_CONFIG_HOME"] = _config.name

# trackio reads its folder when it is first imported, which TRL does too: never the user's own.
_trackio = tempfile.TemporaryDirectory(prefix="treegraft-trackio-")
os.environ["TRACKIO_DIR"] = _trackio.name

# The processes that xdist starts inherit it.
_shared = tempfile.TemporaryDirectory(prefix="treegraft-tests-")
os.environ.setdefault(SHARED, _shared.name)

# Off until the tests are collected: what is loaded and made until then stays, and the collector
# would walk through it again and again, a second each time.
gc.disable()

# No test cuts the power: what a killed process has written, the next one reads. A run of half a
# second waits for the disk eighty times.
os.fsync = not_waited_for

# How long an example takes is a matter of the machine's other work. With the slow tests come all
# examples of laws that name no number of their own.
settings.register_profile("quick", deadline=None, max_examples=30)
settings.register_profile("whole", deadline=None, max_examples=WHOLE)


def pytest_configure(config: pytest.Config) -> None:
    marks = str(config.getoption("-m"))
    settings.load_profile("whole" if "slow" in marks.replace("not slow and", "") else "quick")


LONGEST = (
    "test_resume",
    "extras/test_trl",
    "distributed/test_laws",
    "extras/test_sandbox",
    "core/test_plugins",
    "test_train",
    "settings/test_objects",
    "project/test_readme",
    "extras/test_report",
    "view/test_view_browser",
    "project/test_example_environments",
    "extras/test_study",
    "policy/test_engine",
    "distributed/test_jobs",
    "project/test_package",
    "core/test_packages",
    "tools/test_tools",
    "test_toolstar",
    "policy/test_vllm_engine",
)
"""Files that take long begin first, so that no process is left with one of them at the end."""


@pytest.hookimpl(optionalhook=True)  # not every environment has xdist
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: tests wait for servers, time limits and other processes."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Iterator[None]:
    # A failure is told by parsing its file. A finalizer that runs meanwhile ends Python's parser
    # with "recursion depth mismatch" (CPython gh-106905), and with it all tests.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _leaves_no_group_of_processes() -> Iterator[None]:
    """The test that leaves torch's process group or torchrun's variables behind fails, not the next
    one that trips over them."""
    before = {name: os.environ.get(name) for name in TORCHRUN}
    yield
    left = {name: os.environ.get(name) for name in TORCHRUN if os.environ.get(name) != before[name]}
    for name in left:
        os.environ.pop(name, None)
    is_joined = dist.is_initialized()
    if is_joined:
        dist.destroy_process_group()
    assert not left and not is_joined, f"left behind: {left}, a process group: {is_joined}"


# A suite that a script starts with "&" inherits an ignored SIGINT, and so would the commands whose
# Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
