"""The walk of a value: all functions and parameters that it, or a part of it, is passed to.

`Code` reads the package's modules as syntax trees. It answers what a name means and which class an
expression has. `stays_of` follows a value from one function to the next. Nothing is imported or
run, so a function that is chosen at run time, such as a plugin's, is not followed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, str]
"""A definition: its module and its name there, such as ("runs.run", "Run.save")."""
Stay = tuple[Place, str]
"""A parameter that holds the value: its function and its name."""


@dataclass
class Known:
    """What is known of a class: its bases and the classes of its attributes."""

    bases: list[Place] = field(default_factory=list)
    attributes: dict[str, Place] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    """Names of its attributes in order, whether or not their class is known."""


class Code:
    """The functions and classes of a package, found by name."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.trees = {module: ast.parse(text) for module, text in modules.items()}
        self.functions: dict[Place, Function] = {}
        self.classes: dict[Place, Known] = {}
        self._names: dict[str, dict[str, Place]] = {}
        for module, tree in self.trees.items():
            self._read(module, tree)
        for module, tree in self.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    self._read_class((module, node.name), node)

    def _read(self, module: str, tree: ast.Module) -> None:
        """Takes the names that a module imports and defines."""
        names = self._names[module] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("treegraft."):
                home = str(node.module).removeprefix("treegraft.")
                names |= {one.asname or one.name: (home, one.name) for one in node.names}
        for node in tree.body:
            if isinstance(node, Function):
                self.functions[module, node.name] = node
            elif isinstance(node, ast.ClassDef):
                self.classes[module, node.name] = Known()
                for member in node.body:
                    if isinstance(member, Function):
                        self.functions[module, f"{node.name}.{member.name}"] = member
            else:
                continue
            names[node.name] = (module, node.name)

    def _read_class(self, place: Place, node: ast.ClassDef) -> None:
        """Takes the bases and fields of a class, and what its methods put into `self`."""
        module = place[0]
        known = self.classes[place]
        for base in node.bases:
            found = self.annotated(module, base)
            if found is not None and found != place:
                known.bases.append(found)
        for member in node.body:
            if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name):
                self._add(place, member.target.id, self.annotated(module, member.annotation))
        for member in node.body:
            if isinstance(member, Function):
                kinds = self.kinds(place[0], f"{node.name}.{member.name}")
                for target, value in assigned(member):
                    if is_own(target):
                        self._add(place, target.attr, self.kind(module, value, kinds))

    def _add(self, place: Place, name: str, kind: Place | None) -> None:
        known = self.classes[place]
        known.fields.append(name)
        if kind is not None:
            known.attributes.setdefault(name, kind)

    def find(self, module: str, name: str) -> Place | None:
        """Returns the definition that a name means in a module; None if it is not the package's."""
        place = self._names.get(module, {}).get(name)
        if place is None or place in self.classes or place in self.functions:
            return place
        return self._names.get(place[0], {}).get(place[1])

    def annotated(self, module: str, annotation: ast.expr | None) -> Place | None:
        """Returns the class that an annotation names, the first one of a union."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            return self.annotated(module, ast.parse(annotation.value, mode="eval").body)
        if isinstance(annotation, ast.BinOp):
            left = self.annotated(module, annotation.left)
            return left or self.annotated(module, annotation.right)
        if isinstance(annotation, ast.Subscript):
            # What a function yields in a `with` statement.
            is_yielded = ast.unparse(annotation.value) in ("Iterator", "AsyncIterator")
            return self.annotated(module, annotation.slice) if is_yielded else None
        if isinstance(annotation, ast.Name):
            place = self.find(module, annotation.id)
            return place if place in self.classes else None
        return None

    def kinds(self, module: str, name: str) -> dict[str, Place]:
        """Returns the classes of a function's parameters and local names, where they are known."""
        function = self.functions[module, name]
        found = {}
        own, _, _ = name.rpartition(".")
        for argument in parameters(function):
            kind = self.annotated(module, argument.annotation)
            if own and argument.arg in ("self", "cls"):
                kind = (module, own)
            if kind is not None:
                found[argument.arg] = kind
        for target, value in assigned(function):
            kind = self.kind(module, value, found)
            if isinstance(target, ast.Name) and kind is not None:
                found.setdefault(target.id, kind)
        return found

    def kind(self, module: str, value: ast.expr, kinds: Mapping[str, Place]) -> Place | None:
        """Returns the class of an expression's value; None if it is not known."""
        if isinstance(value, ast.Name):
            return kinds.get(value.id)
        if isinstance(value, ast.Await):
            return self.kind(module, value.value, kinds)
        if isinstance(value, ast.IfExp):
            return self.kind(module, value.body, kinds) or self.kind(module, value.orelse, kinds)
        if isinstance(value, ast.BoolOp):
            return self.kind(module, value.values[0], kinds)
        if isinstance(value, ast.Attribute):
            owner = self.kind(module, value.value, kinds)
            return None if owner is None else self.attribute(owner, value.attr)
        if isinstance(value, ast.Call):
            place = self.called(module, value.func, kinds)
            if place in self.classes:
                return place
            if place is not None:
                return self._returned(place)
        return None

    def _returned(self, place: Place) -> Place | None:
        """Returns the class that a function or property says to return."""
        told, (own, _, _) = self.functions[place].returns, place[1].rpartition(".")
        if own and isinstance(told, ast.Name) and told.id == "Self":
            return place[0], own
        return self.annotated(place[0], told)

    def _lineage(self, owner: Place) -> Iterator[Place]:
        """Yields a class and its bases, the nearest first."""
        yield owner
        for base in self.classes[owner].bases:
            yield from self._lineage(base)

    def attribute(self, owner: Place, name: str) -> Place | None:
        """Returns the class of an attribute or property, of a base's too."""
        for one in self._lineage(owner):
            if name in self.classes[one].attributes:
                return self.classes[one].attributes[name]
            member = one[0], f"{one[1]}.{name}"
            if member in self.functions:
                return self._returned(member)
        return None

    def method(self, owner: Place, name: str) -> Place | None:
        """Returns the method of a class or of a base."""
        found = ((one[0], f"{one[1]}.{name}") for one in self._lineage(owner))
        return next((one for one in found if one in self.functions), None)

    def home(self, owner: Place, name: str) -> Place:
        """Returns the class, this one or a base, that has a field of this name."""
        found = (one for one in self._lineage(owner) if name in self.classes[one].fields)
        return next(found, owner)

    def fields(self, owner: Place) -> list[str]:
        """Returns the names of a class's fields, those of its bases first."""
        lineage = reversed(list(self._lineage(owner)))
        return list(dict.fromkeys(name for one in lineage for name in self.classes[one].fields))

    def held(self, owner: Place) -> dict[str, Place]:
        """Returns the attributes of a class and of its bases whose class is known."""
        found: dict[str, Place] = {}
        for one in reversed(list(self._lineage(owner))):
            found |= self.classes[one].attributes
        return found

    def called(self, module: str, func: ast.expr, kinds: Mapping[str, Place]) -> Place | None:
        """Returns the function or class that a call names."""
        if isinstance(func, ast.Name):
            return self.find(module, func.id)
        if isinstance(func, ast.Attribute):
            if isinstance(func.value, ast.Call) and ast.unparse(func.value) == "super()":
                bases = self.classes[kinds["self"]].bases if "self" in kinds else []
                found = (self.method(base, func.attr) for base in bases)
                return next((one for one in found if one is not None), None)
            owner = self.kind(module, func.value, kinds)
            if owner is None and isinstance(func.value, ast.Name):
                owner = self.find(module, func.value.id)
            if owner in self.classes and owner is not None:
                return self.method(owner, func.attr)
        return None


def parameters(function: Function) -> list[ast.arg]:
    """Returns the named parameters of a function in order."""
    told = function.args
    return [*told.posonlyargs, *told.args, *told.kwonlyargs]


def is_own(target: ast.expr) -> TypeGuard[ast.Attribute]:
    """Whether an expression is an attribute of `self`."""
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def assigned(function: Function) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields each target of a function with the expression that it receives."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            yield node.target, node.value
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.optional_vars is not None:
                    yield item.optional_vars, item.context_expr


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def stays_of(code: Code, start: Stay, is_end: Callable[[str], bool]) -> set[Stay]:
    """Returns the stays of a value that begins in a function's parameter or local name.

    A part of the value is an attribute of it, an attribute of that, and so on. A function that
    receives the value or a part as an argument is a stay, and the walk goes on there. An object
    that stores the value in a field is no stay, but what its methods, or others, pass on from that
    field is followed. The `self` of a method is no argument, and results of calls are no parts.
    The walk enters a module for which `is_end` is true, but goes no further there.
    """
    places = [place for place in code.functions if not is_end(place[0])]
    walk = _Walk(code)
    stays = {start}
    waiting = [start]
    while waiting:
        found: set[Stay] = set()
        while waiting:
            place, parameter = waiting.pop()
            found |= set() if is_end(place[0]) else walk.passed(place, parameter)
        # A field may have been filled, which any function may read.
        for place in places:
            found |= walk.passed(place, "")
        waiting = sorted(found - stays)
        stays |= found
    return stays


class _Walk:
    """The fields that hold a part of the value, and what one function passes on."""

    def __init__(self, code: Code) -> None:
        self._code = code
        self._fields: set[tuple[Place, str]] = set()
        self._kinds = {place: code.kinds(*place) for place in code.functions}
        self._assigned = {place: list(assigned(one)) for place, one in code.functions.items()}
        self._calls = {
            place: [node for node in ast.walk(one) if isinstance(node, ast.Call)]
            for place, one in code.functions.items()
        }

    def passed(self, place: Place, parameter: str) -> set[Stay]:
        """Returns the stays that follow from one; "" for a function without the value."""
        kinds = self._kinds[place]
        held = _Held(self, place[0], kinds, {parameter})
        for target, value in self._assigned[place]:
            if not held.has(value):
                continue
            if isinstance(target, ast.Name):
                held.names.add(target.id)
            elif is_own(target) and "self" in kinds:
                self.store(kinds["self"], target.attr)
        found: set[Stay] = set()
        for call in self._calls[place]:
            found |= self._received(call, held)
        return found

    def store(self, owner: Place, name: str) -> None:
        """Takes a field that holds a part of the value."""
        self._fields.add((self._code.home(owner, name), name))

    def is_stored(self, module: str, value: ast.Attribute, kinds: Mapping[str, Place]) -> bool:
        """Whether an attribute is a field that holds a part of the value."""
        owner = self._code.kind(module, value.value, kinds)
        return (
            owner is not None and (self._code.home(owner, value.attr), value.attr) in self._fields
        )

    def _received(self, call: ast.Call, held: _Held) -> set[Stay]:
        """Returns the parameters of the called function that receive a part of the value."""
        place = self._code.called(held.module, call.func, held.kinds)
        if place is None:
            return set()
        made = place if place in self._code.classes else None
        method = self._code.method(place, "__init__") if made else place
        if method is None:
            assert made is not None
            for name in _receiving(call, self._code.fields(made), held):
                self.store(made, name)
            return set()
        names = [one.arg for one in parameters(self._code.functions[method])]
        if names[:1] in (["self"], ["cls"]):
            names = names[1:]
        return {(method, name) for name in _receiving(call, names, held)}


@dataclass
class _Held:
    """The local names of a function that hold the value or a part of it."""

    walk: _Walk
    module: str
    kinds: Mapping[str, Place]
    names: set[str]

    def has(self, value: ast.expr) -> bool:
        """Whether an expression is the value or a part of it."""
        if isinstance(value, ast.Name):
            return value.id in self.names
        if isinstance(value, ast.Attribute):
            return self.has(value.value) or self.walk.is_stored(self.module, value, self.kinds)
        if isinstance(value, ast.Subscript | ast.Starred):
            return self.has(value.value)
        if isinstance(value, ast.BoolOp):
            return any(map(self.has, value.values))
        return isinstance(value, ast.IfExp) and (self.has(value.body) or self.has(value.orelse))


def _receiving(call: ast.Call, names: list[str], held: _Held) -> list[str]:
    """Returns those of a function's parameters that receive a part of the value in a call."""
    by_place = zip(names, call.args, strict=False)
    by_name = [(one.arg, one.value) for one in call.keywords if one.arg in names]
    return [str(name) for name, value in [*by_place, *by_name] if held.has(value)]
