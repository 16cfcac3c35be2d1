"""What the core requires has permissive licences."""

from __future__ import annotations

import pytest
from benchmarks import licences


def test_all_that_the_core_requires_is_permissive() -> None:
    packages = licences.required()
    assert {"torch", "transformers", "click"} <= packages and "faiss-cpu" not in packages
    assert licences.refused(packages) == []


def test_exceptions_are_required_and_needed() -> None:
    for name in licences.EXCEPTIONS:
        assert name in licences.required() and not licences.is_permissive(licences.licence(name))


@pytest.mark.parametrize(
    ("text", "is_permissive"),
    [
        ("MIT", True),
        ("Apache-2.0 OR GPL-3.0-only", True),
        ("MIT AND (BSD-3-Clause OR ISC)", True),
        ("(MIT OR GPL-3.0-only) AND GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("LGPL-2.1-or-later", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_licences_are_told_apart(text: str, is_permissive: bool) -> None:
    assert licences.is_permissive(text) == is_permissive


def test_a_licence_that_is_not_permissive_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(licences, "licence", lambda name: "GPL-3.0-only")
    (sentence,) = licences.refused(["nvidia-cublas-cu12", "rich", "tqdm"])
    assert sentence.startswith("rich: got the licence 'GPL-3.0-only', expected one of 0BSD, ")
