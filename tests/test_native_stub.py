"""What the type stub says of the compiled engine is what nanobind says of it: names, arguments, defaults, types."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import eyas.native
from eyas import native

if not native.available():
    pytest.skip(native.reason(), allow_module_level=True)

STUB = Path(eyas.native.__file__).with_name("_core.pyi")
ARRAYS = {"int64": "Ints", "float32": "Floats", "float64": "Doubles"}
LOOSE = {"dict", "object", "tuple"}
"""Types of which nanobind knows no more, and the stub may."""

Signature = tuple[list[tuple[str, str, Any]], str]
"""(name, type, default) of each argument, and the returned type; ``...`` where there is no default."""


def declared() -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Functions, classes and, dotted, members of classes in the stub."""
    found: dict[str, ast.FunctionDef | ast.ClassDef] = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            members = [member for member in node.body if isinstance(member, ast.FunctionDef)]
            found.update({f"{node.name}.{member.name}": member for member in members})
    return found


def compiled() -> dict[str, Any]:
    """The same of the module."""
    found: dict[str, Any] = {}
    for name, thing in vars(native.core).items():
        if name.startswith("_"):
            continue
        found[name] = thing
        if isinstance(thing, type):
            members = {key: getattr(thing, key) for key in vars(thing) if key == "__init__" or key[0] != "_"}
            if not hasattr(members.get("__init__"), "__nb_signature__"):  # there is none to call
                members.pop("__init__", None)
            found.update({f"{name}.{key}": member for key, member in members.items()})
    return found


def by_stub(function: ast.FunctionDef) -> Signature:
    arguments, defaults = function.args.args, function.args.defaults
    values = [
        ...,
    ] * (len(arguments) - len(defaults)) + [ast.literal_eval(default) for default in defaults]
    types = [spelled_out(argument.annotation) for argument in arguments]
    return list(zip([a.arg for a in arguments], types, values, strict=True)), spelled_out(function.returns)


def spelled_out(annotation: ast.expr | None) -> str:
    """The annotation as text, the stub's own names for types replaced by what they stand for."""
    text = "" if annotation is None else ast.unparse(annotation)
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = re.sub(rf"\b{node.targets[0].id}\b", ast.unparse(node.value), text)
    return text


def by_nanobind(function: Any) -> Signature:
    [(text, _, values)] = function.__nb_signature__
    text = re.sub(r"ndarray\[dtype=(\w+)[^]]*\]", lambda match: ARRAYS[match[1]], text)
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)  # modules
    match = re.fullmatch(r"def \w*\((.*)\) -> (.*)", text)
    assert match, text
    rest = iter(values or ())
    arguments = []
    for part in outer_parts(match[1]):
        name, _, kind = part.partition(": ")
        kind, equals, _ = kind.partition(" = ")
        arguments.append((name, kind, next(rest) if equals else ...))
    return arguments, match[2]


def outer_parts(text: str) -> Iterator[str]:
    """What stands between commas outside of brackets."""
    depth, part = 0, ""
    for sign in text:
        depth += (sign == "[") - (sign == "]")
        if sign == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += sign
    if part:
        yield part.strip()


def test_stub_and_module_have_the_same_names() -> None:
    assert declared().keys() == compiled().keys()


FUNCTIONS = [name for name, node in declared().items() if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_stub_and_module_have_the_same_signatures(name: str) -> None:
    node, thing = declared()[name], compiled()[name]
    assert isinstance(node, ast.FunctionDef)
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    assert ("property" in decorators) == isinstance(thing, property)
    said, returned = by_stub(node)
    if isinstance(thing, property):
        kinds = [("returned", returned, by_nanobind(thing.fget)[1])]
    else:
        told, result = by_nanobind(thing)
        assert [(argument, default) for argument, _, default in said] == [(a, default) for a, _, default in told]
        kinds = [("returned", returned, result)]
        kinds += [(argument, kind, known) for (argument, kind, _), (_, known, _) in zip(said, told, strict=True)]
    for argument, kind, known in kinds:
        assert kind == known or known in LOOSE, argument


@pytest.mark.parametrize(("name", "base"), [("DynamicRule", "Rule"), ("BudgetedRule", "Rule")])
def test_rules_are_rules(name: str, base: str) -> None:
    node = declared()[name]
    assert isinstance(node, ast.ClassDef)
    assert [ast.unparse(each) for each in node.bases] == [base]
    assert issubclass(getattr(native.core, name), getattr(native.core, base))
