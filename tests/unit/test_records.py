"""Data classes (ark.records) beside the standard library's, on classes of all forms of ark's."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from typing import Any

import pytest

from ark.records import dataclass


def _forms(made: Any, **options: Any) -> dict[str, type]:
    """Classes of many forms, decorated by `made`."""

    @made(**options)
    class Empty:
        pass

    @made(**options)
    class Plain:
        a: int
        b: tuple[int, ...] = (1, 2)

    @made(**options)
    class Fields:
        a: int
        b: list[int] = field(default_factory=list)
        c: str = field(default="c", repr=False)
        d: int = field(default=3, compare=False)
        e: int | None = field(default=None, hash=False)
        f: int = field(default=7, init=False)
        g: dict[str, int] = field(init=False, default_factory=dict, compare=False)
        h: int = field(default=8, kw_only=True)

    @made(**options)
    class Derived(Plain):
        c: float = 0.5
        a: int = 9

    @made(**options)
    class Checked:
        a: int
        total: int = field(init=False, repr=False, compare=False)

        def __post_init__(self) -> None:
            if self.a < 0:
                raise ValueError("negative")
            object.__setattr__(self, "total", self.a + 1)

    @made(**options)
    class Own:
        a: int
        b: int = 0

        def __init__(self, a: int) -> None:
            object.__setattr__(self, "a", a)
            object.__setattr__(self, "b", 2 * a)

        def __repr__(self) -> str:
            return f"own {self.a}"

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Own) and self.a % 10 == other.a % 10

    @made(**options)
    class OwnHash:
        a: int

        def __hash__(self) -> int:
            return 5

    @made(**options)
    class Itself:
        a: Any = None

    return {name: value for name, value in locals().items() if isinstance(value, type)}


OPTIONS = [{}, {"frozen": True}, {"frozen": True, "eq": False}, {"frozen": True, "slots": True}]
CALLS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    *(((), {}), ((1,), {}), ((1, (3,)), {}), ((2,), {}), ((11,), {}), ((-1,), {})),
    *(((1, [2], "x", 4, 5), {"h": 6}), ((1, [2], "y", 4), {}), ((1, [2], "x", 3, 1), {})),
    *(((), {"a": 1}), ((1,), {"a": 1}), ((1,), {"nothing": 2}), ((1, 2, 3, 4, 5, 6, 7), {})),
]


def _outcome(action: Any) -> tuple[str, Any]:
    try:
        return "value", action()
    except Exception as error:
        words = str(error).replace("__create_fn__.<locals>.", "").replace("_forms.<locals>.", "")
        return type(error).__name__, words.split(".")[-1]


def _facts(form: type) -> list[Any]:
    """What can be seen of a class and its instances."""
    facts: list[Any] = [str(inspect.signature(form)), form.__match_args__]
    facts += [[(f.name, f.type, f.init, f.compare) for f in dataclasses.fields(form)]]
    facts += [form.__hash__ is None, form.__hash__ is object.__hash__, form.__eq__ is object.__eq__]
    made = []
    for args, words in CALLS:
        kind, one = _outcome(lambda: form(*copy.deepcopy(args), **copy.deepcopy(words)))  # noqa: B023
        facts.append(kind if kind == "value" else (kind, one))
        made += [one] if kind == "value" else []
    if form.__name__ == "Itself" and "__setattr__" not in form.__dict__:
        made[0].a = made[0]
    for one in made:
        equal = form.__eq__ is not object.__eq__
        facts += [repr(one) if "object at" not in repr(one) else ""]
        if form.__name__ != "Itself":
            facts += [[one == other for other in made], one != made[0], one == 3]
            facts.append(_outcome(lambda: hash(one) if equal else 0))  # noqa: B023
            facts.append(repr(dataclasses.asdict(one)))
        facts.append(_outcome(lambda: repr(dataclasses.replace(one, a=7))))  # noqa: B023
    for one in made:
        facts.append(_outcome(lambda: setattr(one, "a", 1)))  # noqa: B023
        facts.append(_outcome(lambda: setattr(one, "unknown", 1)))  # noqa: B023
        facts.append(_outcome(lambda: delattr(one, "a")))  # noqa: B023
    return facts


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_record_is_what_the_standard_library_makes(options: dict[str, Any]) -> None:
    ours, theirs = _forms(dataclass, **options), _forms(dataclasses.dataclass, **options)
    assert len(ours) == len(theirs) == 8
    for name, form in ours.items():
        assert _facts(form) == _facts(theirs[name]), name


def test_fields_of_one_instance_are_not_anothers() -> None:
    fields = _forms(dataclass)["Fields"]
    one, two = fields(1), fields(1)
    one.b.append(1)
    assert (one.b, two.b) == ([1], [])


@dataclass(frozen=True)
class Kept:
    """Of the module, so that it can be pickled."""

    a: int
    b: tuple[int, ...] = ()


class Named(Kept):
    """A subclass that is no data class may have attributes of its own."""


def test_a_record_is_copied_and_pickled() -> None:
    one = Kept(1, (2, 3))
    assert pickle.loads(pickle.dumps(one)) == copy.copy(one) == copy.deepcopy(one) == one
    assert {one: "x"}[Kept(1, (2, 3))] == "x"
    match one:
        case Kept(a, b):
            assert (a, b) == (1, (2, 3))


def test_a_subclass_has_attributes_but_keeps_the_fields() -> None:
    one = Named(1)
    one.name = "one"
    assert one.name == "one"
    del one.name
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'a'"):
        one.a = 2
    assert one != Kept(1) and repr(one) == "Named(a=1, b=())"
