"""Draws README's picture of the viewer, light and dark: a tree of a recorded run.

    python docs/figures/viewer.py [RUN]     # docs/assets/viewer-light.png and viewer-dark.png

Without RUN, the demo's agent is trained for two updates with branches and grafts, some minutes,
in runs/picture. The tree is drawn that has a graft, a branch, right and wrong answers, and the
least depth. It needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from treegraft import RunResult, Status, Tree
from treegraft.parts import BranchCause, GraftCause

ROOT = Path(__file__).resolve().parents[2]
ASSETS = ROOT / "docs" / "assets"
COMMAND = [sys.executable, "-m", "treegraft"]
TRAIN = ["train", "recipes/demo.toml", 'explorers=["entropy","graft"]', "num_updates=2"]
WIDTH, HEIGHT = 1280, 720


def told(tree: Tree) -> tuple[bool, bool, bool, int]:
    """Returns how well a picture shows the tree: what is in it, then its depth."""
    kinds = {type(step.cause) for step in tree.steps}
    answered = {leaf.reward for leaf in tree.leaves if leaf.status is Status.COMPLETED}
    depth = max(step.depth for step in tree.steps)
    return GraftCause in kinds, BranchCause in kinds, len(answered) > 1, -depth


def draw(run: Path) -> None:
    """Writes both pictures of the run's best tree."""
    result = RunResult.read(run)
    places = {
        f"#/r/{run.name}/t/update-{update:06}/{number}": told(tree)
        for update in (int(line["update"]) for line in result.history if line["update"])
        for number, tree in enumerate(result.trees(update))
    }
    place = max(places, key=places.__getitem__)
    viewer = subprocess.Popen(
        [*COMMAND, "view", str(run), "--no-browser"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert viewer.stdout is not None
    try:
        address = next(
            word for line in viewer.stdout for word in line.split() if word.startswith("http")
        )
        with sync_playwright() as started:
            browser = started.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
            )
            for theme in ("light", "dark"):
                page = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme
                ).new_page()
                page.goto(f"{address}{place}")
                page.wait_for_selector("#page[data-ready]", timeout=60_000)
                page.screenshot(path=str(ASSETS / f"viewer-{theme}.png"))
            browser.close()
    finally:
        viewer.terminate()
        viewer.wait()


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "runs" / "picture"
    if not chosen.exists():
        subprocess.run([*COMMAND, *TRAIN, "run.name=picture"], cwd=ROOT, check=True)
    draw(chosen)
