"""`dataclass` as in the standard library, for a fifth of the time.

The standard library compiles up to six functions from text for every class, where it is defined:
for ark's classes together a third of what `import ark` took behind NumPy, in every process. Here
only `__init__` is compiled then; comparing and hashing are where they are first asked for, and
printing and refusing to change are the same functions for all classes. Everything else is the
standard library's: `field`, `fields`, `replace`, `asdict` and so on work on these classes.
"""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(
        cls: type | None = None, /, *, frozen: bool = False, eq: bool = True, slots: bool = False
    ):
        """The class with the methods that its fields ask for and that it has not itself.

        frozen: instances do not change. eq: they are equal where all fields are, and may be hashed
        if they are frozen; else an instance equals itself alone. slots: another class, without
        a dictionary for each instance, which the standard library makes.
        """

        def made(cls: type) -> type:
            if slots:
                return dataclasses.dataclass(cls, frozen=frozen, eq=eq, slots=True)
            dataclasses.dataclass(cls, init=False, repr=False, eq=False)
            own = cls.__dict__
            fields = dataclasses.fields(cls)
            methods: dict[str, Any] = {"__repr__": _repr}
            if frozen:
                methods |= {"__setattr__": _refuse, "__delattr__": _refuse}
            if eq:
                compared = [f.name for f in fields if f.compare]
                hashed = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
                methods["__eq__"] = _when_asked(cls, "__eq__", _equal, compared)
                if frozen:
                    methods["__hash__"] = _when_asked(cls, "__hash__", _hashed, hashed)
            if "__init__" not in own:
                cls.__init__ = _init(cls, frozen)
            # Python itself says that what has an __eq__ of its own has no hash.
            no_hash = own.get("__hash__", cls) is None and "__eq__" in own
            for name, method in methods.items():
                if name not in own or (no_hash and name == "__hash__"):
                    setattr(cls, name, method)
            if eq and not frozen and "__hash__" not in own:
                cls.__hash__ = None
            return cls

        return made if cls is None else made(cls)


_MISSING: Any = dataclasses.MISSING


class _Factory:
    """Stands in a signature for what a factory gives."""

    def __repr__(self) -> str:
        return "<factory>"


_NEW = _Factory()


def _compiled(cls: type, name: str, text: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function of that text, as if it stood in the class."""
    exec(text, names)
    method = names[name]
    method.__qualname__ = f"{cls.__qualname__}.{name}"
    method.__module__ = cls.__module__
    return method


def _init(cls: type, frozen: bool) -> Callable[..., None]:
    names: dict[str, Any] = {"_set": object.__setattr__, "_NEW": _NEW}
    words: list[str] = ["self"]
    keywords: list[str] = []
    lines: list[str] = []
    annotations: dict[str, Any] = {"return": None}
    for field in dataclasses.fields(cls):
        name, value = field.name, field.name
        names[f"_default_{name}"] = field.default
        word = name if field.default is _MISSING else f"{name}=_default_{name}"
        if field.default_factory is not _MISSING:
            names[f"_new_{name}"] = field.default_factory
            word, value = f"{name}=_NEW", f"_new_{name}() if {name} is _NEW else {name}"
        if field.init:
            (keywords if field.kw_only else words).append(word)
            annotations[name] = field.type
        elif field.default_factory is not _MISSING:
            value = f"_new_{name}()"
        else:
            continue  # the default is the class's
        lines.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    words += ["*", *keywords] if keywords else []
    text = f"def __init__({', '.join(words)}):\n " + "\n ".join(lines or ["pass"])
    method = _compiled(cls, "__init__", text, names)
    method.__annotations__ = annotations
    return method


def _equal(compared: list[str]) -> str:
    ours, theirs = (", ".join(f"{who}.{name}" for name in compared) for who in ("self", "other"))
    both = f"({ours},) == ({theirs},)" if compared else "True"
    test = "other.__class__ is not self.__class__"
    return f"def __eq__(self, other):\n if {test}: return NotImplemented\n return {both}"


def _hashed(compared: list[str]) -> str:
    values = "".join(f"self.{name}, " for name in compared)
    return f"def __hash__(self):\n return hash(({values}))"


def _when_asked(
    cls: type, name: str, text: Callable[[list[str]], str], compared: list[str]
) -> Callable[..., Any]:
    """Becomes the compiled method when it is called."""

    def first(self: object, *other: object) -> Any:
        method = _compiled(cls, name, text(compared), {})
        setattr(cls, name, method)
        return method(self, *other)

    first.__name__, first.__qualname__ = name, f"{cls.__qualname__}.{name}"
    return first


@reprlib.recursive_repr()
def _repr(self: Any) -> str:
    values = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{self.__class__.__qualname__}({', '.join(values)})"


def _refuse(self: Any, name: str, *value: object) -> None:
    """Of instances that do not change; a subclass that is no data class may have attributes."""
    if "__dataclass_fields__" in type(self).__dict__ or name in self.__dataclass_fields__:
        doing = "assign to" if value else "delete"
        raise dataclasses.FrozenInstanceError(f"cannot {doing} field {name!r}")
    if value:
        object.__setattr__(self, name, *value)
    else:
        object.__delattr__(self, name)
