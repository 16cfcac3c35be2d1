"""A user's plain function as a tool."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import JsonSchemaMode

from treegraft.core.errors import SettingError, ToolError
from treegraft.core.interfaces import Capability, Signature
from treegraft.core.text import describe
from treegraft.core.types import Task
from treegraft.tools.json_tools import read_json
from treegraft.tools.own_thread import run_either, run_in_thread


class FunctionTool:
    """A typed function with a docstring, sync or async, as a tool.

    Its name is the tool's, the first paragraph of its docstring the description. A single `str`
    parameter receives the body as it is, a single parameter of another type the body read as JSON,
    several parameters the fields of a JSON object. A parameter annotated `Task` receives the task.
    `func.capability` and `func.cacheable` override "stateless" and False; `func.is_remote` and
    `func.fingerprint` are taken over (see `treegraft.core.interfaces.Tool`).

        def double(number: int) -> str:
            "Doubles a number."
            return str(2 * number)
    """

    def __init__(self, func: Callable[..., Any], *, is_method: bool = False) -> None:
        """Reads name, description, parameters and attributes of `func`.

        Args:
            is_method: `func` has a `self`, which no call fills; only `run` can call it.

        Raises:
            SettingError: no docstring, missing annotations, or a name that makes no tag.
        """
        self.name = getattr(func, "__name__", "")
        if not re.fullmatch(r"[a-z][a-z_]*", self.name):  # the name is a tag in the agent's markup
            raise SettingError(
                f"tool '{self.name}': a tool's name consists of lower-case letters and underscores."
            )
        self.description = " ".join(re.split(r"\n\s*\n", inspect.getdoc(func) or "")[0].split())
        if not self.description:
            raise SettingError(
                f"tool '{self.name}' has no docstring; its first paragraph tells the agent its use."
            )
        capability = getattr(func, "capability", Capability.STATELESS)
        try:
            self.capability = Capability(capability)
        except ValueError:
            kinds = ", ".join(f"'{kind}'" for kind in Capability)
            raise SettingError(
                f"tool '{self.name}': capability is {capability!r}, expected one of {kinds}."
            ) from None
        self.cacheable = bool(getattr(func, "cacheable", False))
        self.is_remote = bool(getattr(func, "is_remote", False))
        self.fingerprint = str(getattr(func, "fingerprint", ""))
        self._func = func
        self._signature = inspect.signature(func)
        if is_method:
            parameters = list(self._signature.parameters.values())
            self._signature = self._signature.replace(parameters=parameters[1:])
        try:
            hints = get_type_hints(func)
        except Exception as error:  # a name that is not imported at run time, or any other
            raise SettingError(
                f"tool '{self.name}': its annotations cannot be read: {describe(error)}"
            ) from error
        self._task_params: list[str] = []
        self._params: dict[str, TypeAdapter[Any]] = {}
        for parameter in self._signature.parameters.values():
            self._add(parameter, hints)
        is_text = [hints[name] for name in self._params] == [str]
        self.signature = Signature(self._schema(), next(iter(self._params)) if is_text else None)

    async def __call__(self, body: str, task: Task) -> str:
        """Returns the function's result (the toolbox turns other types into text).

        Raises `ToolError` for a body that does not fit the parameters, and any exception of the
        function.
        """
        return await self.run(self._func, body, task)  # type: ignore[no-any-return]

    async def run(
        self,
        func: Callable[..., Any],
        body: str,
        task: Task,
        run_blocking: Callable[[Callable[[], Any]], Awaitable[Any]] = run_in_thread,
    ) -> Any:
        """Returns the result of `func`, such as an object's method, called with the arguments in
        `body`. Raises as a call of the tool does."""
        found = dict.fromkeys(self._task_params, task) | self._arguments(body)
        bound = self._signature.bind_partial()
        # Positional parameters are passed in the order in which they stand here.
        bound.arguments = {n: found[n] for n in self._signature.parameters if n in found}
        return await run_either(func, lambda: func(*bound.args, **bound.kwargs), run_blocking)

    async def close(self) -> None:
        """Nothing to release."""

    def _add(self, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
        name, place = parameter.name, f"tool '{self.name}': parameter"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingError(f"{place} '*{name}' cannot be filled; name each parameter.")
        if name not in hints:
            raise SettingError(f"{place} '{name}' has no annotation, such as 'str'.")
        if hints[name] is Task:
            self._task_params.append(name)
            return
        try:
            self._params[name] = TypeAdapter(hints[name])
        except PydanticUserError as error:
            raise SettingError(
                f"{place} '{name}' is annotated {hints[name]}, which cannot be read from JSON."
            ) from error

    def _arguments(self, body: str) -> dict[str, Any]:
        if not self._params:
            return {}
        if self.signature.text_parameter is not None:
            return {self.signature.text_parameter: body}
        fields = read_json(body, f"{self.name} needs JSON, {self._usage()}")
        # A single argument may come bare, since its name tells the agent nothing.
        if len(self._params) == 1 and not (
            isinstance(fields, dict) and fields.keys() == self._params.keys()
        ):
            fields = {next(iter(self._params)): fields}
        if not isinstance(fields, dict):
            raise ToolError(
                f"{self.name} needs a JSON object, {self._usage()}; got {type(fields).__name__}"
            )
        if unknown := next((name for name in fields if name not in self._params), None):
            raise ToolError(f"{self.name} has no parameter '{unknown}'; it takes {self._usage()}")
        arguments: dict[str, Any] = {}
        for name, adapter in self._params.items():
            if name in fields:
                try:
                    arguments[name] = adapter.validate_python(fields[name])
                except ValidationError as error:
                    reason = error.errors(include_url=False)[0]["msg"]
                    raise ToolError(f"{self.name}: '{name}' does not fit: {reason}") from None
            elif self._signature.parameters[name].default is inspect.Parameter.empty:
                raise ToolError(f"{self.name}: '{name}' is missing; it takes {self._usage()}")
        return arguments

    def _schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments, described as in the docstring."""
        # All at once, so that types in common are defined once.
        inputs: list[tuple[str, JsonSchemaMode, TypeAdapter[Any]]] = [
            (name, "validation", adapter) for name, adapter in self._params.items()
        ]
        try:
            found, definitions = TypeAdapter.json_schemas(inputs)
        except PydanticUserError as error:
            raise SettingError(
                f"tool '{self.name}': its parameters have no JSON schema: {error.message}"
            ) from error
        docstring = inspect.getdoc(self._func) or ""
        properties = {}
        for name in self._params:
            properties[name] = dict(found[name, "validation"])
            # The text after "name:" or "name (type):", further lines included.
            if told := re.search(
                rf"^([ \t]*){re.escape(name)}(?: \([^)\n]*\))?:[ \t]+(.+(?:\n\1[ \t]+\S.*)*)",
                docstring,
                re.MULTILINE,
            ):
                properties[name]["description"] = " ".join(told[2].split())
        blank = inspect.Parameter.empty
        required = [n for n in self._params if self._signature.parameters[n].default is blank]
        return {"type": "object", "properties": properties, "required": required, **definitions}

    def _usage(self) -> str:
        return "{" + ", ".join(f'"{name}": ...' for name in self._params) + "}"
