"""A user's plain function as a tool."""

from __future__ import annotations

import inspect
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import JsonSchemaMode

from treegraft.core.errors import SettingError, ToolError
from treegraft.core.interfaces import Capability, Signature, read_json
from treegraft.core.text import describe
from treegraft.core.types import Task
from treegraft.tools.own_thread import run_either, run_in_thread


class FunctionTool:
    """A typed function with a docstring, sync or async, as a tool.

    Its name is the tool's (moveTo becomes move_to), the first paragraph of its docstring the
    description. A single `str` parameter receives the body as it is, a single parameter of another
    type the body read as JSON, several parameters the fields of a JSON object. Those with a default
    may be left out, all of them by an empty body. A parameter annotated `Task` receives the task.
    `func.capability` and `func.cacheable` (not with such a parameter) override "stateless" and
    False; `func.is_remote` and `func.fingerprint` are taken over (see
    `treegraft.core.interfaces.Tool`).

        def double(number: int) -> str:
            "Doubles a number."
            return str(2 * number)
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        name: str = "",
        owner: str = "",
    ) -> None:
        """Reads name, description, parameters and attributes of `func`.

        Args:
            name: the tool's; empty takes that of `func`.
            owner: the class whose method `func` is, for messages: then it has a `self`, which no
                call fills, and only `run` can call it.

        Raises:
            SettingError: no docstring, missing annotations, or a name that makes no tag.
        """
        own_name = name or str(getattr(func, "__name__", ""))
        if not own_name.isidentifier():  # the name is a tag in the agent's markup
            raise SettingError(
                f"tool '{own_name}': got this as its name; expected letters and underscores.",
                code="tool-name-invalid",
            )
        # The tags format knows lower-case letters and underscores alone.
        is_tag = re.fullmatch(r"[a-z][a-z_]*", own_name)
        self.name = own_name if is_tag else tag_of(own_name)
        self._place = f"method '{own_name}' of {owner}" if owner else f"tool '{self.name}'"
        self.description = " ".join(re.split(r"\n\s*\n", inspect.getdoc(func) or "")[0].split())
        if not self.description:
            raise SettingError(
                f"{self._place} has no docstring; its first paragraph tells the agent its use."
                + (" Begin the name with _ where it is not a tool." if owner else ""),
                code="tool-without-docstring",
            )
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise SettingError(
                f"{self._place} yields, so that a call would not run it; return the whole result.",
                code="tool-yields",
            )
        try:
            self.capability = Capability(getattr(func, "capability", Capability.STATELESS))
        except ValueError as error:
            kinds = ", ".join(f"'{kind}'" for kind in Capability)
            raise SettingError(
                f"{self._place}: capability: {error}; expected one of {kinds}.",
                code="capability-unknown",
            ) from error
        self.is_remote = bool(getattr(func, "is_remote", False))
        self.fingerprint = str(getattr(func, "fingerprint", ""))
        self._func = func
        self._signature = inspect.signature(func)
        if owner:
            parameters = list(self._signature.parameters.values())
            self._signature = self._signature.replace(parameters=parameters[1:])
        try:
            hints = get_type_hints(func, include_extras=True)
        except Exception as error:  # a name that is not imported at run time, or any other
            raise SettingError(
                f"{self._place}: its annotations cannot be read: {describe(error)}",
                code="annotations-unreadable",
            ) from error
        self._task_params: list[str] = []
        self._params: dict[str, TypeAdapter[Any]] = {}
        self._required: list[str] = []
        for parameter in self._signature.parameters.values():
            self._add(parameter, hints)
        # Results are kept by the body alone, and those of one task are not another's.
        self.cacheable = bool(getattr(func, "cacheable", False)) and not self._task_params
        is_text = [_bare(hints.get(name)) for name in self._params] == [str]
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
        # Positional parameters are passed in the order in which they stand here.
        given = OrderedDict((n, found[n]) for n in self._signature.parameters if n in found)
        bound = inspect.BoundArguments(self._signature, given)
        return await run_either(func, lambda: func(*bound.args, **bound.kwargs), run_blocking)

    async def close(self) -> None:
        """Nothing to release."""

    def _add(self, parameter: inspect.Parameter, hints: Mapping[str, Any]) -> None:
        name = parameter.name
        place = f"{self._place}: parameter"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise SettingError(
                f"{place} '*{name}' cannot be filled; name each parameter.",
                code="parameter-starred",
            )
        if name not in hints:
            raise SettingError(
                f"{place} '{name}' has no annotation, such as 'str'.",
                code="parameter-without-annotation",
            )
        hint = hints[name]
        if _bare(hint) is Task:
            self._task_params.append(name)
            return
        try:
            self._params[name] = TypeAdapter(hint)
        except PydanticUserError as error:
            raise SettingError(
                f"{place} '{name}' is annotated {hint}, which cannot be read from JSON.",
                code="annotation-no-json",
            ) from error
        if parameter.default is parameter.empty:
            self._required.append(name)

    def _arguments(self, body: str) -> dict[str, Any]:
        if not self._params or not (body.strip() or self._required):
            return {}
        if self.signature.text_parameter is not None:
            name = self.signature.text_parameter
            return {name: self._fitting(name, body)}
        fields = self._named(read_json(body, f"{self.name} needs JSON, {self._usage()}"))
        if not isinstance(fields, dict):
            raise ToolError(
                f"{self.name} needs a JSON object, {self._usage()}; got {type(fields).__name__}",
                code="arguments-no-object",
            )
        # Ignoring it would let the agent believe that it had an effect.
        if unknown := next((name for name in fields if name not in self._params), None):
            raise ToolError(
                f"{self.name} has no parameter '{unknown}'; it takes {self._usage()}",
                code="argument-unknown",
            )
        arguments: dict[str, Any] = {}
        for name in self._params:
            if name in fields:
                arguments[name] = self._fitting(name, fields[name])
            elif name in self._required:
                raise ToolError(
                    f"{self.name}: '{name}' is missing; it takes {self._usage()}",
                    code="argument-missing",
                )
        return arguments

    def _fitting(self, name: str, value: Any) -> Any:
        adapter = self._params[name]
        # Pydantic refuses text with half a surrogate pair; a plain `str` takes any.
        if isinstance(value, str) and adapter.core_schema == {"type": "str"}:
            return value
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"]
            raise ToolError(
                f"{self.name}: '{name}' does not fit: {reason}", code="argument-does-not-fit"
            ) from None

    def _named(self, fields: Any) -> Any:
        """A single argument may come bare, since its name tells the agent nothing."""
        if len(self._params) != 1:
            return fields
        ((name, adapter),) = self._params.items()
        if isinstance(fields, dict):
            if fields.keys() <= {name} and (fields or not self._required):
                return fields
            # An object that is not the argument itself is one of wrong names; where any value would
            # be the argument, it has to be named.
            if adapter.core_schema["type"] == "any":
                return fields
            try:
                adapter.validate_python(fields)
            except ValidationError:
                return fields
        return {name: fields}

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
                f"{self._place}: its parameters have no JSON schema: {error.message}",
                code="parameters-no-schema",
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
        required = list(self._required)
        return {"type": "object", "properties": properties, "required": required, **definitions}

    def _usage(self) -> str:
        """The JSON object that a call holds, as the agent is told it."""
        optional = [f'"{name}"' for name in self._params if name not in self._required]
        named = "{" + ", ".join(f'"{name}": ...' for name in self._params) + "}"
        return f"{named} ({', '.join(optional)} optional)" if optional else named


def _bare(hint: Any) -> Any:
    """The type of Annotated[type, ...], any other hint itself."""
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def tag_of(name: str) -> str:
    """Returns a server's name of a tool in lower-case letters and underscores, as a tag needs it:
    readFile2 gives read_file_two."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    # Spelled out, not dropped: two tools may differ by a digit alone.
    spelled = re.sub(r"[0-9]", lambda digit: f"_{_DIGITS[int(digit[0])]}_", parted)
    return re.sub(r"[^a-z]+", "_", spelled.lower()).strip("_") or "tool"
