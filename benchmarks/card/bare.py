"""A stand-in for pydantic on a machine without it, enough for the settings of model, engine and
learner: values are taken as they are given, unchecked."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, ClassVar


class FieldInfo:
    """A default, with the metadata that a caller appends."""

    def __init__(self, default: Any = ...) -> None:
        self.default = default
        self.metadata: list[Any] = []


class BaseModel:
    """Keyword arguments over the class's defaults."""

    model_fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, **given: Any) -> None:
        known = {
            name: value.default if isinstance(value, FieldInfo) else value
            for kind in reversed(type(self).__mro__)
            for name, value in list(vars(kind).items())
            if name in getattr(kind, "__annotations__", {}) and name != "model_fields"
        }
        if unknown := given.keys() - known.keys():
            raise TypeError(f"{type(self).__name__}: unknown settings {sorted(unknown)}")
        for name, value in (known | given).items():
            setattr(self, name, value)


class TypeAdapter:
    """Stands for checks of files that no benchmark reads."""

    def __init__(self, kind: Any) -> None:
        self.kind = kind


def import_settings() -> bool:
    """Imports engine and learner with their settings; returns whether pydantic is there."""
    if sys.modules.get("pydantic", ...) is not None and importlib.util.find_spec("pydantic"):
        return True
    module, fields = ModuleType("pydantic"), ModuleType("pydantic.fields")
    module.BaseModel = BaseModel  # type: ignore[attr-defined]
    module.ConfigDict = dict  # type: ignore[attr-defined]
    module.TypeAdapter = TypeAdapter  # type: ignore[attr-defined]
    module.Field = lambda default=..., **_: FieldInfo(default)  # type: ignore[attr-defined]
    module.field_validator = lambda *_: lambda method: method  # type: ignore[attr-defined]
    # No table of plugins: settings are those of the core.
    module.create_model = lambda name, *, __base__, **_: __base__  # type: ignore[attr-defined]
    fields.FieldInfo = FieldInfo  # type: ignore[attr-defined]
    before = {name: sys.modules.get(name, ...) for name in ("pydantic", "pydantic.fields")}
    sys.modules |= {"pydantic": module, "pydantic.fields": fields}
    # With all that they import of ours; transformers comes later.
    importlib.import_module("treegraft.policy.learn.learner")
    importlib.import_module("treegraft.policy.engine.native")
    # Away again: other libraries ask whether pydantic is there, and would believe it.
    for name, known in before.items():
        if known is ...:
            del sys.modules[name]
        else:
            sys.modules[name] = known
    return False
