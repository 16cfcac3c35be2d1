"""The check of the pages' English: each rule finds its own case, and plain sentences pass."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from types import ModuleType

import pytest
from tests.support.pages import PAGES, ROOT


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_prose", ROOT / "docs" / "prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


prose = load()

# From pages of version 0.7, and the sentences that an editor would print instead.
BROKEN = {
    "line": "word " * 25,
    "p90": " ".join(["one " * 30 + "end."] * 3),
    "long": "one " * 46 + "end.",
    "paragraph": " ".join(["Nine words are in this short sentence of ours."] * 15),
    "inversion": "The final answer always stays, and so do steps with a call.",
    "chain": "Those of a tree share the cache with those of its group.",
    "where": "Growers hold the trees, and where the recipe asks for them ranks learn.",
    "riddle": "Ranks are placed on as many machines as there are.",
    "semicolons": "It samples; it scores; it learns.",
    "filler": "It is obviously fast.",
}
PLAIN = """# A page

Engines, growers and ranks are placed on all machines of the cluster. Requests of one tree go to the
same engine, to share its cache.

- A list has `one; two; three` in code, and [a link](of_these.md).

| column | meaning |
|---|---|
| `where` | a table's row may be long {long} |

```text
Where code is shown, of these and of them no rule speaks.
```
""".format(long="and longer " * 20)


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_finds_its_own(rule: str) -> None:
    assert rule in {one.rule for one in prose.findings("page", BROKEN[rule] + "\n")}


def test_plain_sentences_pass_and_no_rule_is_without_a_case() -> None:
    assert prose.findings("page", PLAIN) == []
    assert set(BROKEN) == set(prose.RULES) and len(prose.RULES) == 10


def test_an_exception_counts_for_one_paragraph_and_one_rule() -> None:
    excepted = (
        "<!-- prose: chain, a quotation -->\nTwo of them. It is obviously so.\n\nTwo of them.\n"
    )
    assert [(one.line, one.rule) for one in prose.findings("page", excepted)] == [
        (2, "filler"),
        (4, "chain"),
    ]
    # Without a reason it is none.
    assert len(prose.findings("page", "<!-- prose: chain, -->\nTwo of them.\n")) == 1


def test_sentences_are_cut_and_counted() -> None:
    said = prose.sentences("See eq. 5, i.e. `a. B`. Then (as above) stop! It works.")
    assert said == ["See eq. 5, i.e. CODE.", "Then (as above) stop!", "It works."]
    assert prose.num_words("one - two `=` 3.5") == 3
    # Of ten counts the ninth, of eleven the tenth.
    assert prose.p90(list(range(1, 11))) == 9 and prose.p90(list(range(1, 12))) == 10


def test_the_pages_keep_the_rules() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "prose.py")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_a_block_of_python_runs_or_says_why_not() -> None:
    unmarked = [
        f"{name}: {block[:40]}"
        for name, page in PAGES.items()
        for above, block in re.findall(r"(.*)\n```python\n(.*)", page)
        if not re.fullmatch(r"<!-- (?:runnable|not run: \S.+) -->", above)
    ]
    assert unmarked == []
