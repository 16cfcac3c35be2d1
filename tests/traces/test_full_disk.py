"""A disk that fills up while a Step-Trace Buffer is written: it is whole under its name, or not
there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

IN_A_NAMESPACE = ["unshare", "-rm"]


def _can_mount() -> bool:
    if shutil.which("unshare") is None:
        return False
    command = [*IN_A_NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


pytestmark = pytest.mark.skipif(
    not _can_mount(), reason="this machine allows no mounts in a namespace of one's own"
)

PROLOGUE = """
import subprocess, sys
from pathlib import Path
place = Path(sys.argv[1])

def resize(kilobytes, option="remount"):
    options = f"size={kilobytes}k" if option == "" else f"{option},size={kilobytes}k"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(place)], check=True)

resize(100, "")
"""


def run(code: str, place: Path, *words: str) -> str:
    """Returns what a program prints that may mount and resize a disk at `place`."""
    program = textwrap.dedent(PROLOGUE) + textwrap.dedent(code)
    command = [*IN_A_NAMESPACE, sys.executable, "-c", program, str(place), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=900).stdout


def test_a_copy_on_a_full_disk_is_whole_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    code = """
    from tests.traces.test_buffer import trace
    from treegraft.core.errors import DataError
    from treegraft.traces.buffer import TraceBuffer

    source = TraceBuffer(place.parent / "source.sqlite", "hashing")
    source.add([trace(number, key=f"{number}? " + "k" * 2000) for number in range(300)])
    for kilobytes in range(100, 4100, 100):
        for path in place.iterdir():
            path.unlink()
        resize(kilobytes)
        target = place / "traces.sqlite"
        try:
            source.copy_to(target)
        except DataError as error:
            assert "full" in str(error), error
            assert not [*place.iterdir()], [*place.iterdir()]
            print("refused")
            continue
        assert [path.name for path in place.iterdir()] == ["traces.sqlite"]
        resize(64_000)
        with TraceBuffer(target, None) as copy:
            assert [*copy] == [*source] and copy.checksum() == source.checksum()
            (found,) = copy._file.query("PRAGMA integrity_check")
            assert found[0] == "ok"
        print("whole")
    """
    said = run(code, tmp_path / "disk").split()
    assert set(said) == {"refused", "whole"} and said == sorted(said), said


def test_a_log_that_cannot_be_folded_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    code = """
    from tests.traces.test_buffer import trace
    from treegraft.core.errors import DataError
    from treegraft.traces.buffer import TraceBuffer

    resize(2500)
    buffer = TraceBuffer(place / "traces.sqlite", "hashing")
    # In the log there is room for them, in the file beside it there is none.
    (place / "other").write_bytes(b"x" * 1_000_000)
    buffer.add([trace(number, key=f"{number}? " + "k" * 1000) for number in range(100)])
    with (place / "other").open("ab", buffering=0) as file:
        try:
            while file.write(b"x" * 4096):
                pass
        except OSError:
            pass
    try:
        buffer.fold()
    except DataError as error:
        print("refused", "full" in str(error))
    """
    assert run(code, tmp_path / "disk") == "refused True\n"


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [100, 200, 300, 400, 600, 800, 1200, 1600, 2400, 4000])
def test_a_run_whose_disk_was_full_goes_on(tmp_path: Path, kilobytes: int) -> None:
    (tmp_path / "disk").mkdir()
    code = """
    import treegraft
    from tests.test_grafted_runs import BOTH
    from tests.support.tiny import tiny
    from treegraft.core.errors import TreegraftError
    from treegraft.traces.buffer import TraceBuffer

    settings = tiny(**BOTH)
    settings["run"] |= {"dir": str(place), "name": "run", "num_updates": 2}
    settings["warmup"] |= {"num_steps": 2}
    settings["tasks"] |= {"num_train": 150}
    resize(int(sys.argv[2]))
    try:
        treegraft.train(settings, display=False)
        print("finished")
    except (TreegraftError, OSError) as error:
        print(f"{type(error).__name__}: {error}")
    resize(64_000)
    run = place / "run"
    if (run / "config.json").exists():
        treegraft.train(resume=run, display=False)
    else:
        treegraft.train(settings, display=False)
    for file in run.rglob("traces.sqlite"):
        with TraceBuffer(file, None) as found:
            assert len(found)
    print("resumed")
    """
    assert run(code, tmp_path / "disk", str(kilobytes)).endswith("resumed\n")
