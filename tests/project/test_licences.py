"""What the core requires has permissive licences."""

from __future__ import annotations

from benchmarks import licences


def test_all_that_the_core_requires_is_permissive() -> None:
    packages = licences.required()
    assert {"torch", "transformers", "click"} <= packages and "faiss-cpu" not in packages
    assert licences.refused(packages) == []


def test_exceptions_are_required_and_needed() -> None:
    for name in licences.EXCEPTIONS:
        assert name in licences.required() and not licences.is_permissive(licences.licence(name))
