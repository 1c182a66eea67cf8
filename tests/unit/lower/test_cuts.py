"""The planner cuts a product into tiles, and k into parts. The cut that it predicts to be fastest
is one of the fastest measured on an H100.
"""

from __future__ import annotations

import dataclasses

import pytest

from ark.backend import registry
from ark.errors import PlanError
from ark.lower.cuts import candidates, choose_cut, choose_tile

SUM_US = 11.0  # time to add two to four parts, measured within a whole model

# The measured microseconds of a product (rows, columns, k), by its cut (rows and columns of a
# tile, parts of k), with weights read from memory (docs/matmul.md). The last three products were
# measured alone, repeated in a loop.
MEASURED = {
    (512, 3072, 2048): {
        (64, 64, 1): 28.1,
        (128, 64, 1): 26.2,
        (64, 128, 1): 35.4,
        (128, 128, 1): 19.2,
        (64, 256, 1): 28.0,
        (128, 256, 1): 30.7,
        (128, 128, 2): 24.0 + SUM_US,
        (128, 256, 2): 22.9 + SUM_US,
    },
    (512, 2048, 2048): {
        (64, 64, 1): 22.3,
        (128, 64, 1): 17.7,
        (64, 128, 1): 22.5,
        (128, 128, 1): 22.7,
        (128, 128, 2): 13.6 + SUM_US,
        (128, 256, 4): 15.2 + SUM_US,
    },
    (512, 16384, 2048): {
        (128, 256, 1): 60.8,
        (128, 128, 1): 71.2,
        (64, 256, 1): 98.4,
        (128, 64, 1): 102.9,
    },
    (512, 2048, 8192): {
        (64, 64, 1): 75.1,
        (128, 64, 1): 50.3,
        (64, 128, 1): 71.5,
        (128, 128, 2): 33.6 + SUM_US,
        (128, 128, 4): 37.0 + SUM_US,
        (128, 256, 4): 33.7 + SUM_US,
        (64, 256, 2): 48.0 + SUM_US,
    },
    (512, 4096, 4096): {(128, 128, 1): 28.7, (64, 256, 1): 32.3, (128, 256, 2): 38.2},
    (16, 4096, 4096): {(64, 32, 1): 8.6, (64, 64, 2): 8.6, (64, 128, 4): 11.0, (64, 256, 4): 14.1},
    (2048, 2048, 2048): {(128, 256, 1): 26.1, (64, 256, 1): 35.7},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_cut_chosen_is_near_the_fastest_measured(shape: tuple[int, int, int]) -> None:
    rows, columns, depth = shape
    times, machine = MEASURED[shape], registry.machine("h100")
    several = shape != (512, 16384, 2048)  # its gated result is stored directly by its tiles
    cut = choose_cut((1, 1, rows, columns), depth, 2, machine, several, {}, narrow=True)
    assert times[cut.rows, cut.columns, cut.parts] <= 1.02 * min(times.values())


# Times in us on an H200 on 2026-11-29, by (rows, columns, k) of a product and by its cut (rows
# and columns of a tile, parts of k). The products store results one by one instead of by a box
# copy.
BETWEEN = {
    (1024, 768, 768): {(128, 64, 1): 5.4, (64, 96, 1): 5.2},
    (1024, 3072, 768): {(128, 256, 1): 13.9, (128, 192, 1): 11.0},
    (1024, 768, 3072): {(128, 64, 1): 16.0, (64, 96, 1): 14.7},
    (2048, 2304, 768): {(128, 256, 1): 21.9, (128, 144, 1): 14.5},
    (2048, 3072, 768): {(128, 256, 1): 25.9, (128, 192, 1): 19.8},
    (2048, 768, 3072): {(128, 128, 1): 20.2, (128, 96, 1): 19.6},
    (1576, 3072, 768): {(128, 256, 1): 26.2, (128, 160, 1): 18.5},
}


@pytest.mark.parametrize("shape", BETWEEN)
def test_tiles_fill_the_processors_where_sums_are_stored_one_by_one(
    shape: tuple[int, int, int],
) -> None:
    rows, columns, depth = shape
    times, machine = BETWEEN[shape], registry.machine("h200")
    whole = (1, 1, rows, columns)
    cut = choose_cut(whole, depth, 2, machine, True, {}, narrow=True, plain=True)
    assert times[cut.rows, cut.columns, cut.parts] == min(times.values())
    assert choose_cut(whole, depth, 2, machine, True, {}, narrow=True).columns % 64 == 0
    assert choose_cut(whole, depth, 2, machine, True, {}, plain=True).columns % 64 == 0


@pytest.mark.parametrize("shape", [(2048, 3072, 768), (2048, 2304, 768)])
def test_tiles_of_whole_boxes_fill_the_processors_for_any_weights(
    shape: tuple[int, int, int],
) -> None:
    """If k is not contiguous in the right operand, a tile has a multiple of 64 columns of
    16 bits.
    """
    rows, columns, depth = shape
    whole, machine = (1, 1, rows, columns), registry.machine("h200")
    cut = choose_cut(whole, depth, 2, machine, True, {}, plain=True)
    assert (cut.rows, cut.columns, cut.parts) == (128, 192, 1)
    able = candidates(whole, depth, 2, machine, True, plain=True)
    assert {c.columns for c in able} == {64, 128, 192, 256}


@pytest.mark.parametrize(
    ("processors", "rows", "columns", "tile"),
    [
        (2, 128, 576, (128, 288)),  # tiles of 512 and 64 columns would leave a processor idle
        (2, 128, 1536, (128, 384)),
        (2, 512, 512, (256, 512)),
        (16, 512, 512, (128, 128)),
        (1, 7, 13, (7, 13)),
    ],
)
def test_processors_of_one_thread_get_equal_tiles(
    processors: int, rows: int, columns: int, tile: tuple[int, int]
) -> None:
    machine = registry.machine(f"cpu-{processors}")
    assert machine is not None
    assert machine.matmul_tile(rows, columns, 1) == tile


def test_few_rows_keep_the_widths_of_boxes() -> None:
    able = candidates(
        (1, 1, 64, 4096), 4096, 2, registry.machine("h200"), True, narrow=True, plain=True
    )
    assert {c.columns for c in able} == {256, 128, 64, 32}


def test_parts_are_taken_where_a_norm_follows() -> None:
    """The product 512x2048x2048 is cut into two parts of k if a norm follows that adds the parts.
    It takes 13.6 us on an H100.
    """
    cut = choose_cut((1, 1, 512, 2048), 2048, 2, registry.machine("h100"), True, {}, True, True)
    assert (cut.rows, cut.columns, cut.parts) == (128, 128, 2)


@pytest.mark.parametrize(
    ("shape", "depth", "measured"),
    [
        ((16, 1, 64, 3136), 576, (64, 128)),
        ((1, 1, 3136, 512), 4608, (128, 128)),
        ((16, 1, 128, 784), 1152, (128, 128)),
        ((32, 1, 128, 784), 2304, (128, 256)),
    ],
)
def test_products_of_windows_take_the_tiles_that_were_measured(shape, depth, measured) -> None:
    """The planner chooses the tiles that were the fastest for convolutions; the measured times are
    in docs/history/performance.md.
    """
    cut = choose_cut(
        shape, depth, 2, registry.machine("h100"), False, {}, narrow=True, windows=True
    )
    assert (cut.rows, cut.columns, cut.parts) == (*measured, 1)


def test_tiles_are_those_that_the_vendor_has() -> None:
    machine = registry.machine("h100")
    assert machine.box_tiles is not None
    low = tuple(t for t in machine.box_tiles.tiles if t[0] == 64)
    fewer = dataclasses.replace(
        machine, box_tiles=dataclasses.replace(machine.box_tiles, tiles=low)
    )
    able = candidates((1, 1, 512, 2048), 2048, 2, fewer, parts=True)
    assert {(c.rows, c.columns) for c in able} == {(64, 256), (64, 128), (64, 64)}
    none = dataclasses.replace(machine, box_tiles=None)
    with pytest.raises(PlanError, match=r"h100.*no box_tiles"):
        candidates((1, 1, 512, 2048), 2048, 2, none, parts=True)


@pytest.mark.parametrize(
    ("shape", "itemsize", "tile"),
    [((1, 1, 32, 64), 4, (16, 16)), ((1, 1, 32, 64), 2, (32, 32)), ((256, 1, 32, 64), 4, (32, 64))],
)
def test_small_product_of_fp32_is_divided_among_idle_processors(
    shape: tuple[int, ...], itemsize: int, tile: tuple[int, int]
) -> None:
    assert choose_tile(shape, 128, itemsize, registry.machine("h100"), {}) == tile
