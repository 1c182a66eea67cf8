"""Public signatures and class members have types. `Any` is permitted only where a reason is
listed.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

import ark
import ark.interop
import ark.interop.torch
import ark.models
import ark.parallel

PACKAGES = (ark, ark.ops, ark.comm, ark.distributed, ark.interop, ark.interop.torch, ark.models)
PACKAGES += (ark.optim, ark.parallel)
LATER = ("LLM", "SamplingParams", "StructuredOutputsParams")
CALLED = "what a subclass's forward takes and returns, as in torch.nn.Module"
JSON = "objects of JSON, which callers index"
ALLOWED = {
    **dict.fromkeys(
        [
            *("Module.forward(args)", "Module.forward(kwargs)", "Module.forward ->"),
            *("Module.__call__(args)", "Module.__call__(kwargs)", "Module.__call__ ->"),
            *("Module.backward(grad_outputs)", "Module.backward ->"),
        ],
        CALLED,
    ),
    **dict.fromkeys(["Plan.__init__(plan)", "Plan.__init__(head)"], JSON),
    **dict.fromkeys(["Plan.task_infos ->", "Plan.processor_groups ->"], JSON),
    "Tensor.eval ->": "torch's tensor, or NumPy's array without torch",
    "Parameter.eval ->": "as of Tensor",
    "load ->": "whatever was saved",
}


def _says_any(annotation: object) -> bool:
    if annotation is inspect.Parameter.empty:
        return True
    return (
        re.search(r"\bAny\b", annotation if isinstance(annotation, str) else str(annotation))
        is not None
    )


def untyped(name: str, function: Any) -> Iterator[str]:
    """Yields the parameters of a function without an annotation or with Any. The result is written
    as `->`.
    """
    signature = inspect.signature(inspect.unwrap(function))
    for parameter in signature.parameters.values():
        if parameter.name not in ("self", "cls") and _says_any(parameter.annotation):
            yield f"{name}({parameter.name})"
    if _says_any(signature.return_annotation):
        yield f"{name} ->"


def untyped_members(name: str, owner: type) -> Iterator[str]:
    """Yields, as `untyped` does for a function, what lacks an annotation in a class's public
    methods, properties and fields, including those inherited from classes of ark.
    """
    for base in (b for b in owner.__mro__ if b.__module__.partition(".")[0] == "ark"):
        fields = inspect.get_annotations(base)
        yield from (f"{name}.{n}" for n, a in fields.items() if n[0] != "_" and _says_any(a))
        for member, value in base.__dict__.items():
            if member[0] == "_" and member not in ("__init__", "__call__"):
                continue
            value = getattr(value, "__func__", getattr(value, "fget", value))
            value = getattr(value, "func", value)
            if inspect.isfunction(value):
                yield from untyped(f"{name}.{member}", value)


def public() -> dict[str, Any]:
    named = [(p.__name__, n, getattr(p, n)) for p in PACKAGES for n in p.__all__]
    named += [("ark", n, getattr(ark, n)) for n in LATER]
    unique = {id(value): (name, value) for _, name, value in reversed(named)}
    return dict(unique.values())


def test_public_signatures_say_types() -> None:
    names = public()
    assert len(names) > 200
    listed: set[str] = set()
    for name, value in names.items():
        if inspect.isclass(value):
            listed |= set(untyped_members(name, value))
        elif inspect.isfunction(value):
            listed |= set(untyped(name, value))
    assert listed == set(ALLOWED)


@pytest.mark.parametrize("annotation", [Any, "Any", "list[Any]", inspect.Parameter.empty])
def test_signature_with_any_is_reported(annotation: object) -> None:
    def function(x: object) -> None: ...

    function.__annotations__["x"] = annotation
    if annotation is inspect.Parameter.empty:
        del function.__annotations__["x"]
    assert list(untyped("function", function)) == ["function(x)"]


def test_method_with_any_is_reported() -> None:
    class Parent:
        field: Any

        def method(self) -> Any: ...

    Parent.__module__ = "ark.somewhere"
    assert list(untyped_members("Parent", Parent)) == ["Parent.field", "Parent.method ->"]
