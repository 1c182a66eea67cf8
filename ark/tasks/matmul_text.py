"""Writes the C++ text of matrix products: a device function that works on every machine, and parts
that backends use in their own functions. Called by the task kind (ark.tasks.matmul) and by
backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import expression, matmul_small, text
from ark.tasks.matmul_form import (
    POSITION_OPERAND,
    along_k,
    by_halves,
    deal,
    dims,
    ends,
    k_range,
    pair_distance,
    paired,
    part_of_k,
    place_names,
    rotates,
    side_strides,
    sums_of,
)
from ark.tasks.matmul_params import FinishParams, MatmulParams
from ark.tasks.matmul_pixels import tile_text as pixels_text
from ark.tasks.matmul_small import small_text
from ark.tasks.matmul_thin import served, thin_headers, thin_text
from ark.tasks.matmul_windows import tile_text
from ark.tasks.rotary import rope

MIN_PACKED_ROWS = 4  # one thread packs (rearranges) the right operand only for at least these rows
# A tile with fewer multiplications than this is computed directly from device memory, without a
# copy in shared memory.
MIN_STAGED_MULTIPLICATIONS = 2048
STAGED_ROWS_PER_THREAD = 4
STAGED_DEPTH_ELEMENTS = 64  # elements of k that are in shared memory at a time
MAX_LANES_SHARING_K = 8
MAX_COLUMNS_PER_THREAD = 2
MAX_STAGED_BYTES = 48 << 10


def staged(sig: Signature, machine: Machine) -> int:
    """Bytes of shared memory into which parts of both operands of a tile are copied; 0 if the tile
    is computed from memory directly.
    """
    params = sig.read(MatmulParams)
    rows, columns = params.tile
    _, _, k = dims(sig)
    alone = not machine.cooperative or params.reads_images
    if alone or paired(sig) or sums_of(sig) == "int32" or part_of_k(sig) < k:
        return 0
    few = rows < 2 or rows * columns * k < MIN_STAGED_MULTIPLICATIONS
    if few or any(o.packet for o in sig.operands[:2]):
        return 0
    pitch = min(k, STAGED_DEPTH_ELEMENTS) + MAX_LANES_SHARING_K + 1
    need_bytes = 4 * pitch * (-(-rows // STAGED_ROWS_PER_THREAD) * STAGED_ROWS_PER_THREAD + columns)
    held = (
        -(-rows // STAGED_ROWS_PER_THREAD) * columns
        <= MAX_COLUMNS_PER_THREAD * machine.warps * machine.lanes
    )
    fits = need_bytes <= min(MAX_STAGED_BYTES, machine.task_bytes)
    return need_bytes if held and fits else 0


def write(name: str, sig: Signature, machine: Machine) -> str:
    """The C++ text of the device function for a signature, which works on every machine."""
    params = sig.read(MatmulParams)
    if params.windows:
        body = tile_text(sig, dims(sig), lambda row, column: finish(sig, "sum", row, column))
        return text.function(name, outputs(sig) + each_tile(sig, body))
    if params.pixels:
        stored = partial(finish, sig, "sum")
        body = pixels_text(sig, dims(sig), k_range(sig), stored)
        return text.function(name, outputs(sig) + each_tile(sig, body))
    pairs = paired(sig)
    shape: tuple[Any, ...] = (*params.tile, *dims(sig)[:2])
    callee = "ark_matmul_pairs" if pairs else "ark_matmul"
    if not machine.cooperative and not pairs and not params.transpose_b:
        callee = "ark_matmul_alone"
    elif matmul_small.served(sig, machine):
        sides = _line(sig, 0), _line(sig, 1)
        return text.function(name, outputs(sig) + small_text(sig, sides, _finish_one(sig)))
    elif form := served(sig, machine):
        body = thin_text(sig, form, machine, (_line(sig, 0), _line(sig, 1)), _finish_one(sig))
        function = text.function(name, outputs(sig) + each_tile(sig, body))
        return thin_headers(sig, form, machine) + function
    elif staged(sig, machine):
        return _in_shared_memory(name, sig)
    arguments: tuple[str, ...] = (
        "m0",
        "n0",
        *k_range(sig),
        *places(sig),
        finish_text(sig),
    )
    if pairs:
        shape = (*shape, pair_distance(sig))
    if callee == "ark_matmul":
        shape = (*shape, _vector(sig))
        arguments = (*arguments, text.addresses(sig, (0, 1)))
    body = f"  {text.called(callee, shape, arguments)};\n"
    return text.function(name, outputs(sig) + each_tile(sig, body))


def _in_shared_memory(name: str, sig: Signature) -> str:
    params = sig.read(MatmulParams)
    constants = (
        *params.tile,
        *dims(sig),
        STAGED_ROWS_PER_THREAD,
        *(along_k(sig, index) for index in (0, 1)),
    )
    arguments = (
        "m0",
        "n0",
        *places(sig),
        finish_text(sig),
    )
    body = f"  {text.called('ark_matmul_staged', constants, arguments)};\n"
    return text.function(name, outputs(sig) + each_tile(sig, body))


def finish_text(sig: Signature) -> str:
    """The text of a lambda that applies the epilogue and stores the result. Its argument is one sum
    of the product or, if each result depends on two columns, two sums.
    """
    return _finish_pair(sig) if paired(sig) else _finish_one(sig)


def _finish_one(sig: Signature) -> str:
    """The text of a lambda that applies the epilogue to one sum of the product and stores the
    result.
    """
    return f"[&](int m, int n, {_sum_type(sig)} sum) {{\n{finish(sig, 'sum', 'm', 'n')}  }}"


def _finish_pair(sig: Signature) -> str:
    """The text of a lambda that applies the epilogue to the sums of column n and column n +
    pair_distance, and stores the results.
    """
    if by_halves(sig):
        body = _finish_halves(sig)
    elif rotates(sig):
        body = f"      ark_rope_pair(c, {rope(sig, 2, POSITION_OPERAND)}, m, n, sum, next);\n"
    else:
        body = finish(sig, "ark_swiglu(sum, next)", "m", "n / 2")
    return f"[&](int m, int n, float sum, float next) {{\n{body}  }}"


def _finish_halves(sig: Signature) -> str:
    """C++ statements that rotate the pair of values at row m, column n and column `far`, and store
    both results.
    """
    distance, cosines = pair_distance(sig), ends(sig).stop
    lines = [f"const int far = n + {distance};"]
    for name, total, column in (("a", "sum", "n"), ("b", "next", "far")):
        before, value = ended(sig, total, "m", column)
        lines += [f"float {name};", "{", *before, f"{name} = {value};", "}"]
    place = [f"m % {sig.operands[cosines].shape[0]}", f"n % {distance}"]
    tables = ((cosines, "cosine"), (cosines + 1, "sine"))
    for i, name in tables:
        value = text.load(sig, i, f"p{i}", text.offset(sig, i, place))
        lines.append(f"const float {name} = {value};")
    for column, value in (("n", "a * cosine - b * sine"), ("far", "b * cosine + a * sine")):
        at = text.offset(sig, 2, place_names(sig, "m", column))
        lines.append(text.store(sig, 2, "po", at, value))
    return "".join(f"      {line}\n" for line in lines)


def _sum_type(sig: Signature) -> str:
    return "ark_i32" if sums_of(sig) == "int32" else "float"


def outputs(sig: Signature) -> str:
    """Statements that declare the output as po and the further inputs of an expression as p3, p4,
    ...
    """
    others = (text.operand(sig, i, f"p{i}") for i in range(3, len(sig.operands)))
    return text.operand(sig, 2, "po", const=False) + "".join(others)


def finish(sig: Signature, total: str, row: str, column: str) -> str:
    """C++ statements that apply the epilogue to the sum `total` and store the result at a row and a
    column of the output. The variables i0, i1 are the indices of the matrix in the batch.
    """
    lines, value = ended(sig, total, row, column)
    at = text.offset(sig, 2, place_names(sig, row, column))
    lines = [*lines, text.store(sig, 2, "po", at, value)]
    return "".join(f"      {line}\n" for line in lines)


def ended(sig: Signature, total: str, row: str, column: str) -> tuple[list[str], str]:
    """C++ statements that compute the epilogue expression of the sum `total` at a row and a column
    of the output, and the text of its value. The text is `total` itself if there is no expression.
    The variables i0, i1 are the indices of the matrix in the batch.
    """
    expr = sig.read(FinishParams).expr
    if expr is None:
        return [], total
    names, leaves = place_names(sig, row, column), [(total, _sum_type(sig))]
    for i in ends(sig):
        loaded = text.load(sig, i, f"p{i}", text.offset(sig, i, names))
        leaves.append((loaded, text.loaded(sig, i)))
    writer = expression.Writer(leaves, text.literal)
    value, _ = writer.write(expr)
    return writer.statements, value


def each_tile(sig: Signature, body: str) -> str:
    """C++ statements that run `body` for each tile of a task. In the body, the variables i0, i1, m0
    and n0 are the tile's batch indices, first row and first column.

    The threads of the block synchronise between two tiles. In the body, `return false;` ends the
    task.
    """
    return (
        f"  ark_each_tile<{deal(sig)}, true>(t, "
        "[&](int i0, int i1, int m0, int n0) {\n"
        f"  (void)i0; (void)i1;\n{body}  return true;\n  }});\n"
    )


def tile_place(sig: Signature) -> str:
    """C++ texts of the address of a tile's first result, and of the output's strides from row to
    row and from column to column.
    """
    start = text.offset(sig, 2, place_names(sig, "0", "0"))
    down, across = sig.operands[2].strides[-2:]
    return (
        f"po + {start} + static_cast<ark_i64>(m0) * {down} + "
        f"static_cast<ark_i64>(n0) * {across}, {down}, {across}"
    )


def matrix_tiles(
    sig: Signature, callee: str, constants: Sequence[object], end: str, declared: str
) -> str:
    """The text of a device function that calls a vendor's template callee<constants> for each tile,
    with both operands and the epilogue `end`. declared: declarations of names that `end` uses.
    """
    m, n, k = dims(sig)
    rows, columns = sig.read(MatmulParams).tile
    places = place_names(sig, "0", "0")
    starts = [text.offset(sig, i, places) for i in (0, 1)]
    operands = "".join(text.operand(sig, i, f"p{i}") for i in (0, 1))
    sides = [
        f"ark_side<{rows}, {m}, {_side(sig, 0, k)}>(p0 + {starts[0]}, m0)",
        f"ark_side<{columns}, {n}, {_side(sig, 1, k)}>(p1 + {starts[1]}, n0)",
    ]
    if part_of_k(sig) < k:
        sides = [f"ark_part_of_k({side}, {', '.join(k_range(sig))})" for side in sides]
    body = (
        f"  const auto a = {sides[0]};\n  const auto b = {sides[1]};\n"
        f"  {callee}<{', '.join(str(c).lower() for c in constants)}>("
        f"ARK_SCRATCH(c), a, b, {end});\n"
    )
    return operands + declared + each_tile(sig, body)


def _vector(sig: Signature) -> int:
    """The number of elements of k that can be read by one vector load from both operands."""
    size = max(sig.operands[i].itemsize for i in (0, 1))
    vector = min(8, 16 // size)
    _, _, k = dims(sig)
    whole = k % vector == 0 and part_of_k(sig) % vector == 0
    for index in (0, 1):
        *others, last = sig.operands[index].strides
        down = others if side_strides(sig, index)[1] == 1 else []
        whole = whole and last == 1 and bool(down) and all(s % vector == 0 for s in down)
    return vector if whole else 1


def _side(sig: Signature, index: int, depth: int) -> str:
    row, k = side_strides(sig, index)
    even = k == 1 and row % 8 == 0 and depth % 8 == 0
    return f"{depth}, {row}, {k}, {str(even).lower()}"


def places(sig: Signature) -> tuple[str, str]:
    """C++ lambdas that return the addresses of the inputs' elements: one maps (m, k), the other (k,
    n).
    """
    params = sig.read(MatmulParams)
    return (
        _place(sig, 0, "m", "k", params.transpose_a),
        _place(sig, 1, "k", "n", params.transpose_b),
    )


def _place(sig: Signature, index: int, row: str, column: str, transposed: bool) -> str:
    variables = place_names(sig, *((column, row) if transposed else (row, column)))
    return text.place(sig, index, (row, column), variables)


def _line(sig: Signature, index: int) -> str:
    """The text of a C++ lambda that maps (row of a or column of b, k) to an element's address."""
    params = sig.read(MatmulParams)
    across = params.transpose_b if index else not params.transpose_a
    names = ("line", "k") if across else ("k", "line")
    return text.place(sig, index, ("line", "k"), place_names(sig, *names))
