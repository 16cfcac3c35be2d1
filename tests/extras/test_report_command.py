"""`treegraft report` as a command: what it prints, its exit codes, and its page in a real headless
Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.extras.test_report import made_run, write_hostile
from tests.support.viewed import write_run
from tests.view.test_view_large import write_large_run

pytest.importorskip(
    "matplotlib", reason="matplotlib is not installed: pip install 'treegraft[reports]'"
)

from treegraft.cli import main as cli
from treegraft.extras.lab.report.command import write_report

MOST_MB = 400
"""What a report on a large run may take: matplotlib and a line of trees, not the run."""
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def treegraft(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Runs the command line in this process; returns the exit code."""
    monkeypatch.setattr(sys, "argv", ["treegraft", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code if isinstance(ended.value.code, int) else 0


def test_the_command_says_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "first")
    assert (
        treegraft(
            monkeypatch,
            "report",
            run,
            "--only",
            "final-accuracy",
            "--only",
            "sweep",
            "--out",
            tmp_path / "out",
        )
        == 0
    )
    said = capsys.readouterr().out
    assert f"{tmp_path / 'out' / 'report.html'}: 1 figures (final-accuracy)" in said
    assert "no sweep: no two groups differ in one numeric setting, or in the off-policy" in said


@pytest.mark.parametrize(
    ("what", "code"), [("nowhere", 3), ("empty", 3), ("quiet", 2), ("damaged", 2)]
)
def test_exit_codes(
    what: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    made_run(tmp_path / "quiet", {}, [])
    (tmp_path / "damaged").write_text("no study\n")
    assert treegraft(monkeypatch, "report", tmp_path / what, "--out", tmp_path / "out") == code
    assert "error: " in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_without_matplotlib_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert treegraft(monkeypatch, "report", write_run(tmp_path / "first")) == 2
    assert "pip install 'treegraft[reports]'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
@pytest.mark.smoke
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    written = write_report(
        write_hostile(tmp_path), out=tmp_path / "out", only=["training-dynamics", "final-accuracy"]
    )
    asked: list[str] = []
    said: list[str] = []
    with playwright.sync_playwright() as started:
        try:
            browser = started.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=180_000
            )
        except playwright.Error as error:
            pytest.skip(f"Chromium does not start here: {str(error).splitlines()[0]}")
        for width in (1280, 2560):
            page: Any = browser.new_page(viewport={"width": width, "height": 900})
            page.on("request", lambda request: asked.append(request.url))
            page.on("console", lambda message: said.append(message.text))
            page.goto(written.page.as_uri())
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert (
                page.locator("figure svg").count() == 2 and page.locator("body script").count() == 0
            )
            assert "<script>window.hacked=1</script>" in page.locator("body").inner_text()
        browser.close()
    assert asked == [written.page.as_uri()] * 2 and said == []


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="memory is read from /proc, which only Linux has"
)
def test_a_large_run_is_streamed(tmp_path: Path) -> None:
    path = write_large_run(tmp_path / "large")
    code = (
        "import sys\nfrom treegraft.cli.main import main\nsys.argv = ['treegraft', 'report',"
        " sys.argv[1]]\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code,"
        " end.code\nassert 'torch' not in sys.modules\nprint(next(line for line in"
        " open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
        timeout=500,
    )
    most = int(done.stdout.split("VmHWM:")[1].split()[0]) / 1024
    print(f"largest memory {most:.0f} MB")
    assert most < MOST_MB
