"""Expression trees, which describe how one element of an elementwise result is computed. Passes
fuse ops by combining their trees; this module checks trees and writes them as C++.

A tree is nested lists, as in JSON: `["input", i]` is the element of operand i, `["number", x]` a
constant (an integer if x is one), `["index", d]` the element's own index in dimension d of the
result (d < 0, -1 is the last), `["cast", dtype, tree]` a value rounded to a type, and `[function,
tree, ...]` a function of ark.tasks.functions. Trees come from the lowering or from a plan file.
Names are looked up and numbers are printed as numbers, so that no text of a file becomes code.

A value has one of four C types: float for all floating point, ark_i32 for integers of at most 32
bits, ark_i64 for int64 and uint32, bool. A function's arguments are converted to the widest type
among them. A cast or the store converts a result to a narrower type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ark.errors import PlanError
from ark.ir.dtype import FLOATS as FLOAT_TYPES
from ark.ir.dtype import INTEGERS as INTEGER_TYPES
from ark.ir.dtype import SMALL_FLOATS, by_name
from ark.tasks.functions import FUNCTIONS
from ark.tasks.gelu import gelu_of

Tree = Sequence[Any]

INTEGERS = tuple(t.name for t in INTEGER_TYPES)
FLOATS = tuple(t.name for t in (*FLOAT_TYPES, *SMALL_FLOATS))
SIXTEEN_BITS = ("fp16", "bf16")
MAX_NODES = 64
MAX_DIMS = 8
_CASTS = (*FLOATS, *INTEGERS, "bool")
_NARROW = ("int8", "uint8", "byte", "uint32")
_WIDE = ("int64", "uint32")
_BY_ZERO = ("div", "rdiv", "floor_divide", "mod", "fmod")  # of integers; division by 0 gives 0
_RANKS = ("bool", "ark_i32", "ark_i64", "float")


def leaf(index: int) -> list[Any]:
    """The expression tree that reads the element of operand `index`."""
    return ["input", index]


def number(value: float) -> list[Any]:
    """The tree for a constant: an integer if the value is an int, otherwise floating point."""
    return ["number", value if type(value) is int else float(value)]


def index(dimension: int) -> list[Any]:
    """The tree for the index of the computed element in a dimension; -1 is the last dimension."""
    return ["index", dimension]


def size(tree: Tree) -> int:
    """The number of nodes of an expression tree that has been checked."""
    return 1 + sum(size(part) for part in _children(tree))


def written_size(tree: Tree) -> int:
    """The number of operands, numbers and functions that a Writer writes for a checked tree. GELU
    that is written out counts as one function.
    """
    gelu = gelu_of(tree)
    parts = _children(tree) if gelu is None else (gelu.argument,)
    return 1 + sum(written_size(part) for part in parts)


def places(tree: Tree) -> bool:
    """True if a checked tree uses the index of the element that it computes."""
    return bool(indices(tree))


def indices(tree: Tree) -> frozenset[int]:
    """The dimensions whose index a checked tree uses; -1 is the last."""
    if tree[0] == "index":
        return frozenset({tree[1]})
    return frozenset().union(*(indices(part) for part in _children(tree)))


def reads(tree: Tree) -> frozenset[int]:
    """The indices of the operands that an expression tree reads. The tree must have been
    checked.
    """
    if tree[0] == "input":
        return frozenset({tree[1]})
    return frozenset().union(*(reads(part) for part in _children(tree)))


def _children(tree: Tree) -> Sequence[Tree]:
    if tree[0] in ("input", "number", "index"):
        return ()
    return tree[2:] if tree[0] == "cast" else tree[1:]


def value_type(dtype: str) -> str:
    """The C type in which elements of this data type are computed."""
    if dtype == "bool":
        return "bool"
    if dtype in INTEGERS:
        return "ark_i64" if dtype in _WIDE else "ark_i32"
    return "ark_i32" if dtype in ("int4", "uint4") else "float"


def check(tree: Any, dtypes: Sequence[str], rank: int = MAX_DIMS) -> str:
    """Raises PlanError, which names the part, unless the tree is an expression over operands of
    these types. Returns the C type of its value.

    rank: the result's number of dimensions.
    """
    left = [MAX_NODES]
    return _check(tree, dtypes, rank, left)


def typed(tree: Tree, inputs: Sequence[str], dtype: str) -> Tree:
    """The tree to use where other ops compute with a tree's value directly instead of reading the
    tensor in which it is stored as `dtype`. It gets a cast to `dtype` if the values would otherwise
    differ. inputs: the data types of the operands. Elements of less than a byte are not cast,
    because the store converts them.
    """
    if dtype not in _CASTS or tree[:2] == ["cast", dtype]:
        return tree
    fits = dtype not in _NARROW and check(tree, inputs) == value_type(dtype)
    return tree if fits else ["cast", dtype, tree]


def _number_type(value: float) -> str:
    if type(value) is int:
        return "ark_i32" if -(1 << 31) <= value < 1 << 31 else "ark_i64"
    return "float"


def _check(tree: Any, dtypes: Sequence[str], rank: int, left: list[int]) -> str:
    """Checks a part of a tree and returns the C type of its value. Raises PlanError if it is not
    valid. left: a list with one number, the number of nodes that the rest of the tree may still
    have.
    """
    left[0] -= 1
    if left[0] < 0:
        raise PlanError(f"an expression has more than {MAX_NODES} parts")
    if not isinstance(tree, list | tuple) or len(tree) < 2 or not isinstance(tree[0], str):
        raise PlanError(f"{tree!r:.80} is not an expression; expected [function, argument, ...]")
    head, *rest = tree
    if head == "input":
        known = len(rest) == 1 and type(rest[0]) is int and 0 <= rest[0] < len(dtypes)
        if not known:
            raise PlanError(
                f"an expression reads input {rest!r:.40}, but there are {len(dtypes)} inputs"
            )
        return value_type(dtypes[rest[0]])
    if head == "number":
        known = len(rest) == 1 and type(rest[0]) in (int, float)
        if not known or (type(rest[0]) is int and not -(1 << 63) <= rest[0] < 1 << 63):
            raise PlanError(f"an expression has {rest!r:.40} where a number is expected")
        return _number_type(rest[0])
    if head == "index":
        known = len(rest) == 1 and type(rest[0]) is int and -rank <= rest[0] < 0
        if not known:
            raise PlanError(f"an expression uses index {rest!r:.40} of {rank} dimensions")
        return "ark_i32"
    if head == "cast":
        if len(rest) != 2 or rest[0] not in _CASTS:
            raise PlanError(f"an expression casts to {rest!r:.40}; expected one of {_CASTS}")
        _check(rest[1], dtypes, rank, left)
        return value_type(rest[0])
    if head not in FUNCTIONS or FUNCTIONS[head].arity != len(rest):
        raise PlanError(
            f"an expression calls {head!r:.40} with {len(rest)} arguments; the functions are "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
    return _result(head, [_check(part, dtypes, rank, left) for part in rest])


def _computes(name: str, types: Sequence[str]) -> str:
    """The C type to which a function's arguments are converted. The condition of `where` is not
    converted.
    """
    function = FUNCTIONS[name]
    if function.logical:
        return "bool"
    widest = max(types[1:] if name == "where" else types, key=_RANKS.index)
    if widest == "bool" and name in ("where", "copy"):
        return widest
    return "ark_i32" if widest == "bool" else widest


def _result(name: str, types: Sequence[str]) -> str:
    """The C type of a function's value. Raises PlanError if its arguments have unsuitable types."""
    function = FUNCTIONS[name]
    bools = types if function.logical else types[:1] if name == "where" else ()
    if any(t != "bool" for t in bools):
        raise PlanError(f"an argument of {name} is a number, expected bool; compare it with 0")
    compute = _computes(name, types)
    if compute in ("ark_i32", "ark_i64") and function.integer is None:
        raise PlanError(f"{name} of integers is not supported; cast them to floating point")
    if compute == "float" and not function.floating:
        raise PlanError(f"{name} is for integers; cast its arguments")
    return function.value_type(compute)


def rebuilt(tree: Tree, change: Callable[[Tree], Tree | None]) -> list[Any]:
    """A copy of the tree in which parts are replaced. change: a function that is called with a
    part. It returns the tree to use instead, or None to keep the part; it is then called with the
    parts inside of it.
    """
    changed = change(tree)
    if changed is not None:
        return list(changed)
    parts = _children(tree)
    return [*tree[: len(tree) - len(parts)], *(rebuilt(part, change) for part in parts)]


def substitute(tree: Tree, inputs: Sequence[Tree]) -> list[Any]:
    """The expression tree in which each use of operand i is replaced by the tree `inputs[i]`."""
    return rebuilt(tree, lambda part: inputs[part[1]] if part[0] == "input" else None)


def own_part(tree: Tree, operand: int, beside: frozenset[int]) -> Tree | None:
    """The largest part of a checked tree that contains all uses of `operand` and otherwise reads
    only the operands in `beside`; None if there is no such part.
    """
    if reads(tree) <= {operand, *beside}:
        return tree
    users = [part for part in _children(tree) if operand in reads(part)]
    return own_part(users[0], operand, beside) if len(users) == 1 else None


def has_casts(tree: Tree) -> bool:
    """True if a checked tree contains a cast."""
    return tree[0] == "cast" or any(map(has_casts, _children(tree)))


def replaced(tree: Tree, part: Tree, by: Tree) -> Tree:
    """The expression tree in which the subtree `part` (compared by identity) is replaced by
    `by`.
    """
    return rebuilt(tree, lambda each: by if each is part else None)


def counted(tree: Tree, place: Tree) -> list[Any]:
    """The expression tree in which each use of an index is replaced by the tree `place`."""
    return rebuilt(tree, lambda part: place if part[0] == "index" else None)


def evaluate(
    tree: Tree, inputs: Sequence[np.ndarray], shape: Sequence[int] | None = None
) -> np.ndarray:
    """The tree's value in NumPy, in float64 (or integers), for tests and references.

    shape: the result's shape, if it is not the inputs' broadcast shape.
    """
    if tree[0] == "input":
        return inputs[tree[1]]
    if tree[0] == "number":
        return np.asarray(tree[1])
    if tree[0] == "index":
        full = tuple(shape or np.broadcast_shapes(*(i.shape for i in inputs)))
        d = len(full) + tree[1]
        return np.arange(full[d]).reshape([-1 if e == d else 1 for e in range(len(full))])
    values = [evaluate(part, inputs, shape) for part in _children(tree)]
    if tree[0] == "cast":
        kind = by_name(tree[1]).numpy
        if tree[1] == "bool":
            return np.asarray(values[0] != 0)
        if tree[1] in INTEGERS:
            whole: np.ndarray = np.trunc(values[0])
            return whole.astype(np.int64).astype(kind).astype(np.int64)
        return values[0].astype(kind).astype(np.float64)
    if tree[0] in _BY_ZERO and all(v.dtype.kind in "iu" for v in values):
        top, bottom = values[::-1] if tree[0] == "rdiv" else values
        safe = np.where(bottom == 0, 1, bottom)
        quotient = np.abs(top) // np.abs(safe) * np.sign(top) * np.sign(safe)
        truncated = tree[0] in ("div", "rdiv")
        result = quotient if truncated else FUNCTIONS[tree[0]].reference(top, safe)
        return np.where(bottom == 0, 0, result)
    return FUNCTIONS[tree[0]].reference(*values)


class Writer:
    """Writes an expression tree as C++ statements, each of which declares a local constant for one
    subtree.
    """

    def __init__(
        self, leaves: Sequence[tuple[str, str]], literal: Any, indices: Sequence[str] = ()
    ) -> None:
        """leaves: for each operand (text of its element, C type). indices: texts of the element's
        own index, by dimension.
        """
        self._leaves = leaves
        self._literal = literal
        self._indices = indices
        self.statements: list[str] = []
        self.known: dict[tuple[str, str], str] = {}  # names by C type and value

    def write(self, tree: Tree, rounded: bool = False) -> tuple[str, str]:
        """The C++ text and the C type of the tree's value. The statements that must come before the
        text are added to `statements`. rounded: True if the value is rounded to 16 bits.
        """
        if tree[0] == "input":
            return self._leaves[tree[1]]
        if tree[0] == "number":
            return self._number(tree[1])
        if tree[0] == "index":
            return f"static_cast<ark_i32>({self._indices[tree[1]]})", "ark_i32"
        gelu = gelu_of(tree)
        if gelu is not None:
            argument = _as(self.write(gelu.argument), "float")
            return self.let("float", f"{gelu.function}({argument})"), "float"
        if tree[0] == "cast":
            within = tree[1] in SIXTEEN_BITS
            return self._cast(self.write(tree[2], within), tree[1])
        function = FUNCTIONS[tree[0]]
        values = [self.write(part, rounded and function.steady) for part in _children(tree)]
        types = [kind if kind in _RANKS else "ark_i32" for _, kind in values]
        types = [_WORDS.get(kind, t) for (_, kind), t in zip(values, types, strict=True)]
        compute = _computes(tree[0], types)
        wanted = ["bool" if tree[0] == "where" and i == 0 else compute for i in range(len(values))]
        names = {
            letter: self._named(want, _as(value, want))
            for letter, value, want in zip("abc", values, wanted, strict=False)
        }
        whole = compute in ("ark_i32", "ark_i64")
        text = (function.integer if whole else rounded and function.rounded) or function.expr
        text = re.sub(r"\bINT\b", compute, text)
        text = re.sub(r"\bUINT\b", "ark_u" + compute[-2:], text)
        code = re.sub(r"\b[abc]\b", lambda m: names[m.group()], text)
        result = function.value_type(compute)
        return self.let(result, code), result

    def _number(self, value: float) -> tuple[str, str]:
        kind = _number_type(value)
        if kind == "float":
            return self._literal(value), kind
        # In C++ the smallest 64-bit integer cannot be written as one literal.
        text = "(-9223372036854775807ll - 1)" if value == -(1 << 63) else f"{int(value)}ll"
        return f"static_cast<{kind}>({text})", kind

    def _cast(self, value: tuple[str, str], name: str) -> tuple[str, str]:
        if name == "bool":
            return self.let("bool", f"{value[0]} != 0"), "bool"
        if name in INTEGERS:
            ctype = by_name(name).storage
            return self.let(ctype, f"static_cast<{ctype}>({value[0]})"), ctype
        text = _as(value, "float")
        if name == "fp32":
            return text, "float"
        return self.let("float", f"ark_float({by_name(name).rounding}({text}))"), "float"

    def _named(self, ctype: str, text: str) -> str:
        """A C++ name for a value, so that a function can use the value more than once."""
        return text if re.fullmatch(r"x\d+", text) else self.let(ctype, text)

    def let(self, ctype: str, text: str) -> str:
        """Adds a C++ statement that declares a local constant with the value `text`, unless there
        is one; returns the constant's name.
        """
        if (ctype, text) not in self.known:
            self.known[ctype, text] = name = f"x{len(self.statements)}"
            self.statements.append(f"const {ctype} {name} = {text};")
        return self.known[ctype, text]


_WORDS = {by_name(name).storage: value_type(name) for name in INTEGERS}


def _as(value: tuple[str, str], ctype: str) -> str:
    if value[1] == ctype:
        return value[0]
    if ctype == "bool":
        return f"({value[0]} != 0)"
    return f"static_cast<{ctype}>({value[0]})"
