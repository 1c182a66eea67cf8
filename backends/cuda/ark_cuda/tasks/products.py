"""Matrix products by wgmma (sm_90a) or tcgen05 (sm_100a), in the variant `matrix`. They support
bf16 and fp16 with any transposes; 8-bit floats, int8 and tf32 with contiguous k; batches, ragged
edges and parts of k.

Tiles have 128 or 64 rows. The loading thread copies boxes of both operands to shared memory through
tensor maps, swizzled so that they are multiplied without bank conflicts. Elements outside of an
operand are loaded as zeros; those outside of the result are not written. Called by matmul.py.
"""

from __future__ import annotations

import math

from ark.backend.codegen.body import BoxMap
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import OperandType, Signature
from ark.tasks import matmul_vectors as vectors
from ark.tasks import text
from ark.tasks.matmul_form import by_halves, deal, dims, k_range, part_of_k, rotates
from ark.tasks.matmul_params import MatmulParams, WindowParams
from ark.tasks.matmul_text import outputs
from ark_cuda.tasks import code_products, halves, pairs, pixels, product_store, windows
from ark_cuda.tasks.inline import header
from ark_cuda.tasks.pairs import MIN_TILE_COLUMNS, tile_columns
from ark_cuda.tasks.stages import STAGES_BYTES
from ark_cuda.tasks.wgmma import BYTES, HALVES, multiply, once, sum_of

HEIGHTS = (64, 128)
BOX_COLUMNS = 64  # columns of a box, if k is not the contiguous dimension
_COMMON_WIDTHS = (MIN_TILE_COLUMNS, 64, 96, 128, 160, 192, 224, 256)
WIDTHS = {64: _COMMON_WIDTHS, 128: (*_COMMON_WIDTHS, 144)}  # columns of tiles, by their rows
STAGE_K_BYTES = 128  # bytes along k in a stage, per row
SLAB_COLUMNS = 64  # columns that pass through a slab at a time
# For small tiles: lines along k in a stage, and how many such stages must at least fit.
DEEPER = ((4, 6), (2, 4))


def serves_machine(machine: Machine) -> bool:
    """True if the machine has wgmma or tcgen05 and the kernel variant is `matrix`."""
    able = machine.has(Capability.WGMMA) or machine.has(Capability.TCGEN05)
    return able and machine.variant.name == "matrix"


def serves(sig: Signature, machine: Machine) -> bool:
    """True if this body can compute the signature's tiles."""
    params = sig.read(MatmulParams)
    rows, columns = params.tile
    left, _, out = sig.operands[:3]
    paired = params.gated or rotates(sig)
    plain = params.expr is None and not paired
    stored = (out.dtype in _stored(left.dtype) or not plain) and (
        not rotates(sig) or _rotates_here(sig)
    )
    if by_halves(sig) and not _turns_here(sig):
        return False
    if code_products.type_of(sig) is not None:
        packets = any(o.packet for o in sig.operands)
        able = serves_machine(machine) and stored and not packets
        return able and code_products.serves(sig, machine)
    return (
        serves_machine(machine)
        and _typed(sig)
        and stored
        and (rows in HEIGHTS or rows == dims(sig)[0] < HEIGHTS[-1])
        and tile_columns(sig) in WIDTHS[height(sig)]
        and (columns % BOX_COLUMNS == 0 or params.transpose_b)
        and (columns % BOX_COLUMNS == 0 or columns == MIN_TILE_COLUMNS or not paired)
        and _mappable(sig, 0)
        and _mappable(sig, 1)
        and not any(o.packet for o in sig.operands)
    )


def _rotates_here(sig: Signature) -> bool:
    """True if this body can rotate queries and keys: all results have the same 16-bit type, and the
    columns that a warp stores at once (SLAB_COLUMNS) belong to one head.
    """
    types = {sig.operands[i].dtype for i in (2, 5, 6)}
    return (
        len(types) == 1
        and types <= set(HALVES)
        and sig.read(MatmulParams).head_dim % SLAB_COLUMNS == 0
    )


def _turns_here(sig: Signature) -> bool:
    """True if this body can rotate heads by halves: a warpgroup stores whole heads."""
    whole = sig.read(MatmulParams).tile[0] <= HEIGHTS[-1] and sig.operands[0].dtype in HALVES
    return whole and halves.serves(sig, _wide(sig))


def _typed(sig: Signature) -> bool:
    """True if there are matrix instructions for the types and layouts of both operands."""
    params = sig.read(MatmulParams)
    left, right = (o.dtype for o in sig.operands[:2])
    if left in HALVES:
        return left == right
    side_by_side = not params.transpose_a and params.transpose_b
    if left in BYTES:
        return side_by_side and right in BYTES
    asked = left == "int8" or (left == "fp32" and params.tf32)
    return asked and left == right and side_by_side


def _stored(dtype: str) -> tuple[str, ...]:
    """The types in which the sums of products of `dtype` can be stored without an expression."""
    if dtype in BYTES:
        return ("fp32", *HALVES)
    return ("int32",) if dtype == "int8" else (dtype, "fp32")


def multiplies(sig: Signature, machine: Machine) -> bool:
    """True for a product that this body computes."""
    return sig.kind == "matmul" and serves(sig, machine)


def height(sig: Signature) -> int:
    """The number of rows that a tile's matrix instructions compute, which may be more than the
    tile's rows.
    """
    return next(h for h in HEIGHTS if h >= sig.read(MatmulParams).tile[0])


def _high(sig: Signature) -> int:
    """The rows of a that a stage holds: the tile's rows, or all rows of a if they are fewer."""
    rows = height(sig)
    return rows if sig.read(MatmulParams).transpose_a else min(rows, -(-dims(sig)[0] // 8) * 8)


def stage_bytes(sig: Signature) -> int:
    """Bytes of a stage (a slot of the ring in shared memory) for this product."""
    dtype = code_products.type_of(sig)
    if dtype is not None:
        return code_products.stage(sig, dtype)
    return _line_bytes(sig) * _lines(sig)


def _line_bytes(sig: Signature) -> int:
    """Bytes of one line of both operands. A line is 128 bytes along k of each row of a and each
    column of b.
    """
    return STAGE_K_BYTES * (_high(sig) + tile_columns(sig))


def _lines(sig: Signature) -> int:
    """The number of lines (128 bytes along k) in a stage. Small tiles have several lines, because
    starting the copies of a small stage takes longer than the copies themselves. Slots of the ring
    have the size of the plan's largest stage. So with one line in each slot too few bytes would be
    in flight.
    """
    params = sig.read(MatmulParams)
    _, _, k = dims(sig)
    deep, part = STAGE_K_BYTES // sig.operands[0].itemsize, part_of_k(sig)
    across = params.transpose_a or not params.transpose_b
    if params.pixels or k % deep or k != _depth(sig) or across or not _flat(sig):
        return 1
    counts = part // deep, (k % part or part) // deep
    for lines, stages in DEEPER:
        fits = lines * _line_bytes(sig) <= STAGES_BYTES // stages
        if fits and all(n % lines == 0 for n in counts):
            return lines
    return 1


def _wide(sig: Signature) -> int:
    """Columns of a tile that one warpgroup stores."""
    return tile_columns(sig) // (1 if height(sig) == 128 else 2)


def _windows(sig: Signature, index: int) -> WindowParams | None:
    """The parameters of the convolution windows if operand `index` is a matrix of windows, else
    None.
    """
    params = sig.read(MatmulParams).windows
    return params if params is not None and params.side == index else None


def _depth(sig: Signature) -> int:
    """The number of elements along k that are loaded. For convolution windows it includes the zeros
    with which the channels at each element of the kernel are padded.
    """
    params = sig.read(MatmulParams).windows
    if params is None:
        return dims(sig)[2]
    return windows.padded_depth(sig.operands[params.side], params)


def _mappable(sig: Signature, index: int) -> bool:
    """True if a tensor map can describe the operand: at most four dimensions, and rows that begin
    at multiples of 16 bytes.
    """
    operand, convolution = sig.operands[index], _windows(sig, index)
    if sig.read(MatmulParams).pixels is not None:
        return pixels.serves(sig, index)
    if convolution is not None:
        return windows.serves(operand, convolution)
    return len(operand.shape) <= 4 and all(
        s * operand.itemsize % 16 == 0 for s in operand.strides[:-1]
    )


def maps(sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
    """The tensor maps of a and b. In a task record the addresses of the maps follow those of the
    operands.
    """
    params = sig.read(MatmulParams)
    if not serves(sig, machine):
        return ()
    dtype = code_products.type_of(sig)
    if dtype is not None:
        return code_products.maps(sig, dtype)
    deep = STAGE_K_BYTES // sig.operands[0].itemsize
    a_rows = deep if params.transpose_a else _high(sig)
    b_rows = tile_columns(sig) if params.transpose_b else deep
    flat = _flat(sig)
    box_maps = []
    for i, rows in ((0, a_rows), (1, b_rows)):
        operand, seen = sig.operands[i], _windows(sig, i)
        if params.pixels is not None:
            box_maps.append(pixels.pixel_map(sig, i, rows, params.pixels))
        elif seen is not None:
            box_maps.append(windows.window_map(operand, i, rows, seen))
        elif params.windows is not None and _depth(sig) > dims(sig)[2]:
            source = sig.operands[params.windows.side]
            box_maps.append(windows.weight_map(operand, i, rows, source, params.windows))
        elif _lines(sig) > 1:
            box_maps.append(_map_of_lines(sig, i, rows))
        else:
            box_maps.append(_map(operand, i, rows, flat))
    return tuple(box_maps)


def _flat(sig: Signature) -> bool:
    """True if both operands are single matrices. A matrix of convolution windows counts as one."""
    sides = (i for i in (0, 1) if _windows(sig, i) is None)
    shapes = (text.pad4(sig.operands[i].shape, 1) for i in sides)
    return all(shape[0] == shape[1] == 1 for shape in shapes)


def _map(operand: OperandType, index: int, rows: int, flat: bool) -> BoxMap:
    shape, strides = text.pad4(operand.shape, 1), text.pad4(operand.strides, 0)
    sizes = tuple(reversed(shape))
    steps = tuple(s * operand.itemsize or 16 for s in reversed(strides[:3]))
    deep = STAGE_K_BYTES // operand.itemsize
    if flat:
        return BoxMap(index, operand.dtype, sizes[:2], steps[:1], (deep, rows))
    return BoxMap(index, operand.dtype, sizes, steps, (deep, rows, 1, 1))


def _map_of_lines(sig: Signature, index: int, rows: int) -> BoxMap:
    """The tensor map whose boxes are consecutive lines of k of a matrix with contiguous k. A box is
    copied line by line, over all of its rows. If each operand is read from memory once, lines are
    fetched alone: with its neighbour, each line would be fetched twice.
    """
    operand, lines = sig.operands[index], _lines(sig)
    deep = STAGE_K_BYTES // operand.itemsize
    high, k = operand.shape[-2:]
    pitch = operand.strides[-2] * operand.itemsize
    dims_of, strides, box = (deep, high, k // deep), (pitch, STAGE_K_BYTES), (deep, rows, lines)
    fetched = STAGE_K_BYTES if dims(sig)[0] <= HEIGHTS[0] else 2 * STAGE_K_BYTES
    return BoxMap(index, operand.dtype, dims_of, strides, box, fetched=fetched)


def _product(sig: Signature) -> str:
    """The C++ type that describes a product, for the loading thread and the computing warps."""
    params = sig.read(MatmulParams)
    across = (params.transpose_a, not params.transpose_b)
    numbers = (height(sig), tile_columns(sig), _high(sig))
    flags = (*(str(flag).lower() for flag in (*across, _overlaps(sig))), str(_lines(sig)))
    types = (o.ctype for o in sig.operands[:2])
    listed = ", ".join((deal(sig), *types, *map(str, numbers), *flags))
    return f"ArkProduct<{listed}>"


def write(name: str, sig: Signature, machine: Machine) -> str:
    """The source of the function that the computing warps run."""
    params = sig.read(MatmulParams)
    across = (int(params.transpose_a), int(not params.transpose_b))
    sums = f"{sum_of(sig.operands[0])} (&d)[{_wide(sig) // 2}]"
    sides = sig.operands[0], sig.operands[1]
    turned = halves.store(sig, _wide(sig))
    form = turned or pairs.store(sig, _wide(sig))
    own = "" if vectors.residual(sig) is None else once("ARK_RESIDUAL", header("residual.h"))
    if turned is not None:
        own += once("ARK_HALVES", header("halves.h"))
    elif form is not None:
        own += once("ARK_PAIRS", header("pairs.h"))
    if code_products.type_of(sig) is not None:
        call = code_products.compute(sig, k_range(sig))
    else:
        call = (
            f"ark_matrix_product<{_product(sig)}>(\n"
            f"      c, t, [&](int i1) {{ (void)i1; return {_steps(sig)}; }},"
        )
        if not machine.has(Capability.TCGEN05):
            own += multiply(tile_columns(sig), sides, across)
    # The function is inlined, because in a called function the compiler would wait for each wgmma
    # before it starts the next.
    return (
        own
        + f"""ARK_DEVICE void {name}(ArkCtx& c, const ArkTask& t) {{
{outputs(sig)}  {call}
      [&](int i0, int i1, int m0, int n0, int top, int left0) {{
  (void)i0; (void)i1; (void)n0;
{"" if form is None else form.prepared}  return [=, &c, &t]({sums}) {{
  (void)t;
{product_store.store(sig, _wide(sig), form)}  }};
      }});
}}
"""
    )


# The products of two stages overlap if both operands of the matmul have at most this many bytes in
# total. On an H100 overlap makes a product of 4096^3 2.5% faster. It makes 8192^3 8% slower,
# because its operands come from memory and need all stages. Products of weights with a few hundred
# rows are also faster without overlap: a prompt of 512 tokens by 1.4%.
OVERLAP_BYTES = 128 << 20
WEIGHT_ROWS, WEIGHT_BYTES = range(129, 513), 8 << 20


def _overlaps(sig: Signature) -> bool:
    a, b = (math.prod(o.shape) * o.itemsize for o in sig.operands[:2])
    weights = dims(sig)[0] in WEIGHT_ROWS and b >= WEIGHT_BYTES
    return a + b <= OVERLAP_BYTES and not weights


def _k_range(sig: Signature) -> tuple[str, str]:
    """C++ expressions for a tile's first element along k and for the end (last element + 1). For
    convolution windows they count the padding of channels (see `_depth`).
    """
    depth = _depth(sig)
    return k_range(sig) if depth == dims(sig)[2] else ("0", str(depth))


def _steps(sig: Signature) -> str:
    """The C++ expression for the number of stages of a tile."""
    k0, k1 = _k_range(sig)
    deep = STAGE_K_BYTES // sig.operands[0].itemsize * _lines(sig)
    if k0 == "0":
        return f"{-(-int(k1) // deep)}u"
    return f"static_cast<ark_u32>(({k1} - {k0} + {deep - 1}) / {deep})"


def load(name: str, sig: Signature, machine: Machine) -> str | None:
    """The source of the function with which the loading thread loads the product's operands. None
    if this body does not support the signature.
    """
    if not serves(sig, machine):
        return None
    dtype = code_products.type_of(sig)
    if dtype is not None:
        return code_products.load(name, sig, dtype, k_range(sig))
    k0, k1 = _k_range(sig)
    flat, first = _flat(sig), len(sig.operands)
    padded = sig.read(MatmulParams).windows if _depth(sig) > dims(sig)[2] else None
    summed = sig.read(MatmulParams).pixels
    batches = []
    for index in (0, 1):
        operand, seen = sig.operands[index], _windows(sig, index)
        if summed is not None:
            batches.append(f"{pixels.pixel_type(sig, index, summed)}{{}}")
            continue
        if seen is not None:
            batches.append(f"{windows.window_type(operand, seen)}{{}}")
            continue
        if padded is not None:
            source = sig.operands[padded.side]
            batches.append(f"{windows.weight_type(source, padded)}{{}}")
            continue
        shape = text.pad4(operand.shape, 1)
        flags = (flat, shape[0] > 1, shape[1] > 1)
        batches.append(f"ArkBatch<{', '.join(str(f).lower() for f in flags)}>{{}}")
    return (
        f"{windows.TAPS if padded is not None else ''}"
        f"{pixels.PIXELS if summed is not None else ''}"
        f"ARK_DEVICE void {name}_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {{\n"
        f"  ark_matrix_load_product<{_product(sig)}>(\n"
        f"      c, t, load, t.operand[{first}], t.operand[{first + 1}], "
        f"[](int i1) {{ (void)i1; return {k0}; }},\n"
        f"      [](int i1) {{ (void)i1; return {k1}; }}, {', '.join(batches)});\n}}\n"
    )
