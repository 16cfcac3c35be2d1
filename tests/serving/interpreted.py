"""Loaded as `sitecustomize` by servers of tests: vLLM's build for CPUs then takes Triton for
usable, which with TRITON_INTERPRET=1 it is, and so its V2 runner runs without a GPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


class Finder(MetaPathFinder):
    """Gives Triton the backend for CPUs that vLLM looks for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns that of triton.backends, with one more entry in its table once it is loaded."""
        if name != "triton.backends":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_more(module: Any) -> None:
            load(module)
            driver = types.SimpleNamespace(is_active=lambda: True)
            module.backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)

        spec.loader.exec_module = load_more
        return spec


sys.meta_path.insert(0, Finder())
