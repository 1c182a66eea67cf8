"""The form of a custom op, which is the user's declaration of it: operands with named axes, tiling
and device source. Created by ark.custom_op, read by ark.tasks.custom.

`x[m, k], w[k] -> y[m, k]` names every operand's dimensions. If an axis m is cut into tiles, `m` in
a signature means that a task accesses its tile of the dimension, `all m` that it accesses the whole
dimension, and `m+-2` that it accesses its tile and two more indices on either side. A number is a
dimension of that size. An operand on both sides is updated in place. A form's digest is a hash of
everything that the planner, the verifier and the source writer use. A plan names a form by its
digest and contains no source text: plans are data, and only the process itself supplies code that
runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ark.errors import InvalidUsageError, PlanError
from ark.ir.dtype import by_name
from ark.plan.params import INT_MAX
from ark.plan.types import MAX_OPERANDS
from ark.tasks.custom_text import check_text
from ark.tasks.text import MIN_ADDRESS_DIMS

CALLED = ("name", "waits", "signals")  # keyword arguments of a call of the op
MOST_AXES = 6  # axes that can be cut: a task has this many coordinates
Constant = bool | int | float
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_OPERAND = re.compile(r"\s*([A-Za-z]\w*)\s*\[([^\[\]]*)\]\s*")
_PLACED = re.compile(r"(?:.*[\\/])?([\w.-]+)[:(]\d+")  # FILE:LINE: or FILE(LINE):
_ERROR = re.compile(r"\b(fatal )?error\b.*")  # the error message, after the file and line
_MAX_COMPILER_LINES = 40  # the most lines of a compiler's output that are shown
_DIM = re.compile(r"\s*(?:(all)\s+)?([A-Za-z]\w*)\s*(?:\+-\s*(\d{1,9}))?\s*")
# Words that cannot name an axis or a constant of a custom op: axes and constants become members of
# a C++ struct, and these are C++ keywords.
_WORDS = """
all and asm auto bool break case catch char class const continue default delete do double else enum
explicit export extern false float for friend goto if inline int long mutable namespace new not
operator or private protected public register return short signed sizeof static struct switch
template this throw true try typedef typename union unsigned using virtual void volatile while xor
"""
_KEYWORDS = frozenset(_WORDS.split())


@dataclass(frozen=True)
class Dim:
    """A dimension of an operand. axis: the name of its axis; "" for a dimension of fixed size
    `size`. whole: True if each task accesses all of it. around: the number of indices that a task
    accesses on either side of its tile.
    """

    axis: str
    size: int = 0
    whole: bool = False
    around: int = 0


@dataclass(frozen=True)
class Operand:
    """An operand. dtypes: the names of the types that it may have; empty for any type."""

    name: str
    dims: tuple[Dim, ...]
    read: bool
    written: bool
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Form:
    """A custom op. operands: first those that are read, then those that are only written.

    tile: for each axis that is cut the size of a tile; 0 if the size is to give each processor one
    tile. constants: their names with the names of their types (bool, int, float). scratch: bytes of
    shared memory, and for each axis further bytes per index of a tile. packets: operands that may
    arrive as packets, so that loading an element waits for it. file: the file name for the source
    text in compiler messages.
    """

    name: str
    file: str
    text: str
    operands: tuple[Operand, ...]
    results: tuple[str, ...]
    tile: Mapping[str, int]
    constants: Mapping[str, str]
    scratch: tuple[int, Mapping[str, int]]
    packets: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The hash of the whole form, by which plans refer to it."""
        text = (
            *(self.name, self.file, self.text, self.operands, self.results),
            *(list(self.tile.items()), list(self.constants.items())),
            *(self.scratch[0], list(self.scratch[1].items()), self.packets),
        )
        return hashlib.sha256(repr(text).encode()).hexdigest()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes, in the order of their first occurrence in the signature."""
        named = (dim.axis for operand in self.operands for dim in operand.dims if dim.axis)
        return tuple(dict.fromkeys(named))

    def place(self, name: str) -> int:
        """The index of the operand with this name."""
        return next(i for i, operand in enumerate(self.operands) if operand.name == name)

    def sizes(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
        """The sizes of the axes, from the shapes of some operands; raises InvalidUsageError if they
        contradict each other.
        """
        sizes: dict[str, tuple[int, str]] = {}
        for operand in (o for o in self.operands if o.name in shapes):
            shape = tuple(shapes[operand.name])
            if len(shape) != len(operand.dims):
                raise InvalidUsageError(
                    f"{self.name}: {operand.name} has shape {list(shape)}; expected "
                    f"{shown(operand)}, {len(operand.dims)} dimensions"
                )
            for n, dim in zip(shape, operand.dims, strict=True):
                known, where = sizes.get(dim.axis, (n, "")) if dim.axis else (dim.size, "")
                if n != known:
                    there = f"in {where} it is {known}" if where else f"expected {known}"
                    raise InvalidUsageError(
                        f"{self.name}: {operand.name} has shape {list(shape)}, where "
                        f"{dim.axis or 'a dimension'} is {n}; {there}"
                    )
                if dim.axis:
                    sizes.setdefault(dim.axis, (n, operand.name))
        return {axis: n for axis, (n, _) in sizes.items()}


def shown(operand: Operand) -> str:
    """The operand as text, in the notation of the op's signature, such as `x[m, all k]`."""
    dims = []
    for dim in operand.dims:
        text = f"all {dim.axis}" if dim.whole else dim.axis or str(dim.size)
        dims.append(f"{text}+-{dim.around}" if dim.around else text)
    return f"{operand.name}[{', '.join(dims)}]"


def parse(
    name: str,
    file: str,
    text: str,
    signature: str,
    tile: Mapping[str, int | None],
    dtypes: Mapping[str, Sequence[str]],
    constants: Mapping[str, str],
    scratch: tuple[int, Mapping[str, int]],
    packets: tuple[str, ...],
) -> Form:
    """The form that a user's declaration describes. Raises InvalidUsageError for a
    mistake in it.
    """
    _check_name(name, "the op", "its function's name")
    left, arrow, right = signature.partition("->")
    if not arrow:
        raise _wrong(name, f"the signature {signature!r} has no '->' before its results")
    inputs, outputs = _operands(name, left), _operands(name, right)
    if not outputs:
        raise _wrong(name, f"the signature {signature!r} has no result behind '->'")
    operands = [
        Operand(n, dims, True, n in outputs, tuple(dtypes.get(n, ()))) for n, dims in inputs.items()
    ]
    operands += [
        Operand(n, dims, False, True, tuple(dtypes.get(n, ())))
        for n, dims in outputs.items()
        if n not in inputs
    ]
    for repeated in (n for n in outputs if n in inputs and inputs[n] != outputs[n]):
        raise _wrong(
            name,
            f"{repeated} is updated in place, but its dimensions differ on either side of '->'",
        )
    sizes = {axis: int(n or 0) for axis, n in tile.items()}
    form = Form(
        name, file, text, tuple(operands), tuple(outputs), sizes, dict(constants), scratch, packets
    )
    _check(form, dtypes)
    check_text(name, file, text)
    return form


def _wrong(name: str, reason: str) -> InvalidUsageError:
    return InvalidUsageError(f"custom op {name!r}: {reason}")


def _check_name(name: str, role: str, means: str) -> None:
    if not _NAME.fullmatch(name) or name in _KEYWORDS or name.lower().startswith("ark"):
        raise InvalidUsageError(
            f"{role} is called {name!r}; {means} must be letters, digits and underscores, must not "
            "be a C++ keyword and must not begin with ark"
        )


def _operands(name: str, text: str) -> dict[str, tuple[Dim, ...]]:
    """The operands on one side of the arrow in a signature: the dimensions of each, by name."""
    operands: dict[str, tuple[Dim, ...]] = {}
    at = 0
    while text[at:].strip():
        match = _OPERAND.match(text, at)
        end = match.end() if match else at
        if match is None or text[end : end + 1] not in ("", ","):
            raise _wrong(name, f"{text[at:].strip()!r} is not an operand; write it like x[m, k]")
        if match[1] in operands:
            raise _wrong(name, f"{match[1]} appears twice on one side of '->'")
        _check_name(match[1], f"custom op {name!r}: an operand", "a name")
        operands[match[1]] = tuple(_dim(name, match[1], part) for part in match[2].split(","))
        at = end + 1
    return operands


def _dim(name: str, operand: str, text: str) -> Dim:
    if text.strip().isdigit() and 1 <= int(text) <= INT_MAX:
        return Dim("", int(text))
    match = _DIM.fullmatch(text)
    if match is None or (match[1] and match[3]):
        raise _wrong(
            name,
            f"{text.strip()!r} is not a dimension of {operand}; expected an axis (m), all of an "
            "axis (all m), an axis with neighbours (m+-2) or a size (3)",
        )
    _check_name(match[2], f"custom op {name!r}: an axis", "a name")
    return Dim(match[2], 0, bool(match[1]), int(match[3] or 0))


def _check(form: Form, dtypes: Mapping[str, Sequence[str]]) -> None:
    """Raises InvalidUsageError if the parts of a form contradict each other."""
    names = [operand.name for operand in form.operands]
    if len(names) > MAX_OPERANDS:
        raise _wrong(form.name, f"it has {len(names)} operands; at most {MAX_OPERANDS} fit")
    for operand in form.operands:
        if len(operand.dims) > MIN_ADDRESS_DIMS:
            raise _wrong(
                form.name,
                f"{shown(operand)} has {len(operand.dims)} dimensions; at most "
                f"{MIN_ADDRESS_DIMS} are supported, so merge some with ark.reshape",
            )
        for dtype in operand.dtypes:
            if by_name(dtype).packed:
                raise _wrong(form.name, f"{operand.name} is {dtype}, whose elements share bytes")
    for unknown in (n for n in dtypes if n not in names):
        raise _wrong(form.name, f"dtypes names {unknown!r}; its operands are {', '.join(names)}")
    for wrong in (n for n in form.packets if n not in names):
        raise _wrong(form.name, f"packets names {wrong!r}; its operands are {', '.join(names)}")
    for name in (o.name for o in form.operands if o.name in form.packets and o.read and o.written):
        raise _wrong(form.name, f"{name} is updated in place, but packets are written once")
    axes = form.axes
    for unknown in (n for n in (*form.tile, *form.scratch[1]) if n not in axes):
        raise _wrong(form.name, f"it has no axis {unknown!r}; its axes are {', '.join(axes)}")
    if len(form.tile) > MOST_AXES or any(not 0 <= n <= INT_MAX for n in form.tile.values()):
        raise _wrong(
            form.name,
            f"the tile is {dict(form.tile)}; it must give at least 1 for at most {MOST_AXES} axes",
        )
    for constant in form.constants:
        _check_name(constant, f"custom op {form.name!r}: a constant", "a name")
        if constant in axes or constant in names:
            raise _wrong(
                form.name, f"{constant} is the name of a constant and of an operand or axis"
            )
    for taken in (n for n in (*names, *axes, *form.constants) if n in CALLED):
        raise _wrong(
            form.name,
            f"{taken} is already the name of an argument of a call",
        )
    if any(n in names for n in axes):
        raise _wrong(form.name, "an axis and an operand have the same name")
    _check_written(form)


def _check_written(form: Form) -> None:
    """Raises InvalidUsageError unless each element of a result is written by exactly one tile,
    because the tasks of an op are not ordered among themselves.
    """
    for operand in (o for o in form.operands if o.written):
        cut = [d.axis for d in operand.dims if d.axis and not d.whole]
        for dim in operand.dims:
            if (dim.whole and dim.axis in form.tile) or dim.around:
                raise _wrong(
                    form.name,
                    f"{shown(operand)} is written, so each task needs a tile of its own in every "
                    f"axis: give the dimension as {dim.axis}, without `all` or neighbours",
                )
        for axis in (a for a in form.tile if a not in cut):
            raise _wrong(
                form.name,
                f"the tile divides axis {axis} among tasks, but {shown(operand)} does not have "
                f"it, so all these tasks would write the same elements; give {operand.name} the "
                f"axis {axis}, or remove {axis} from the tile",
            )
        if len(set(cut)) < len(cut):
            raise _wrong(form.name, f"{shown(operand)} has an axis twice")


def complaints(fault: str, names: Iterable[tuple[str, str]]) -> str:
    """Selects from the compiler messages in `fault` those that are about the source texts of these
    custom ops, with the source lines that the compiler shows. names: the name and digest of each
    op. Returns "" if there are no such messages. If a text calls one of ark's templates wrongly,
    the message about the template is included without its file and line.
    """
    forms = [get(*name) for name in names]
    files = {name for form in forms for name in (form.file, f"{form.name}.call")}
    kept, shows, theirs = [], False, False
    for line in fault.splitlines():
        placed = _PLACED.match(line)
        if placed:
            shows = placed[1] in files
            theirs = theirs or shows
        elif not line.startswith(" "):
            shows = False
        if shows:
            kept.append(line)
        elif placed and (error := _ERROR.search(line, placed.end())):
            kept.append(error[0])
    return "\n".join(kept[:_MAX_COMPILER_LINES]) if theirs else ""


_FORMS: dict[str, Form] = {}  # by digest


def register(form: Form) -> str:
    """Registers the form, so that this process can run plans that contain the op; returns its
    digest.
    """
    digest = form.digest
    _FORMS[digest] = form
    return digest


def get(name: str, digest: str) -> Form:
    """The form with this digest; raises PlanError if this process has not registered it under that
    name.
    """
    form = _FORMS.get(digest)
    if form is not None and form.name == name:
        return form
    others = [d for d, f in _FORMS.items() if f.name == name]
    here = f"has another text or declaration of it ({others[-1][:12]})" if others else "has none"
    raise PlanError(
        f"the plan runs the custom op {name!r} (digest {digest[:12]}), and this process {here}; a "
        "plan contains no code: register the same op by ark.custom_op before the plan is used"
    )
