"""Attention over paged caches, compared with torch's scaled_dot_product_attention in float64 over
the same positions in contiguous memory, and appends to such caches.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.errors import ModelError
from tests.cases.paged import Shape, by_torch, case, table
from tests.emulated import few_emulated
from tests.opcheck import check

SHAPES = (
    Shape((5, 0, 23), 3, 4, 2, 16, 8, 3, 12),
    Shape((13,), 6, 2, 2, 24, 16, 2, 5),
    Shape((255, 300), 2, 8, 2, 64, 32, 10, 40),
    Shape((6,), 1, 3, 1, 8, 1, 7, 9),
    Shape((90,), 9, 4, 1, 32, 5, 20, 20),
    Shape((70,), 40, 2, 1, 16, 16, 7, 9, window=33),
    Shape((30, 2), 2, 2, 1, 24, 8, 4, 9, window=10, sinks=True),
    Shape((0,), 21, 4, 2, 64, 4, 6, 6, softcap=3.0, sinks=True),
)


def test_paged_attention_equals_torch(backend: str) -> None:
    types = (ark.fp32, ark.fp16, ark.bf16)
    check([case(s, d, i) for i, s in enumerate(SHAPES) for d in types])


@pytest.mark.parametrize("positions", few_emulated([(5, 0, 23), (6,), (22,)], (5, 0, 23), (22,)))
def test_rows_are_written_where_the_table_says(backend: str, positions: tuple[int, ...]) -> None:
    """paged_append writes rows to the pages of the table. For one sequence, rows beyond the table,
    or on a page whose number is invalid, are dropped.
    """
    rng = np.random.default_rng(1)
    cache, rows = (rng.standard_normal(s).astype(np.float32) for s in ((9, 2, 8, 4), (3, 8)))
    pages = np.array([[3, 0, 7], [8, -1, -1], [5, 9, 1]], np.int32)[: len(positions)]
    target, given = ark.tensor([9, 2, 8, 4]), ark.tensor([3, 8])
    at, numbers = ark.tensor([len(positions)], ark.int32), ark.tensor(list(pages.shape), ark.int32)
    appended = ark.paged_append(target, given, numbers, at)
    ark.copy(appended)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in ((target, cache), (given, rows), (numbers, pages)):
            tensor.from_numpy(array)
        at.from_numpy(np.array(positions, np.int32))
        runtime.run()
        got = appended.to_numpy()
    want, alone = cache.copy(), len(positions) == 1
    for r in range(3):
        place = positions[0] + r if alone else positions[r]
        if place >= 24:
            continue
        page = pages[0 if alone else r, place // 8]
        for head in range(2):
            want[page, head, place % 8] = rows[r, 4 * head : 4 * head + 4]
    np.testing.assert_array_equal(got, want)


def test_loop_appends_and_reads(backend: str) -> None:
    """Two sequences grow by a row in each iteration. After the last one, attention equals
    torch's.
    """
    s = Shape((11, 3), 2, 4, 2, 16, 4, 4, 8)
    pages = table(s, 3)
    rng = np.random.default_rng(2)
    first = rng.standard_normal((2, s.pool, s.kv_heads, s.page, s.width)).astype(np.float32)
    x = rng.standard_normal((2, 64)).astype(np.float32)
    caches = [ark.tensor(list(first.shape[1:])) for _ in range(2)]
    rows, numbers = ark.tensor([2, 64]), ark.tensor(list(pages.shape), ark.int32)
    at = ark.tensor([2], ark.int32)
    ark.add(at, ark.constant(1, [2], ark.int32), output=at)
    keys, values = (ark.paged_append(c, rows[:, :32], numbers, at) for c in caches)
    attended = ark.paged_attention(rows, keys, values, numbers, at)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in zip((*caches, rows, numbers), (*first, x, pages), strict=True):
            tensor.from_numpy(array.astype(tensor.dtype().numpy))
        at.from_numpy(np.array([8, 0], np.int32))
        runtime.run(3)
        got, cached = attended.to_numpy(), [c.to_numpy() for c in caches]
    want = first.copy()
    for b, start in enumerate((9, 1)):
        for place in range(start, start + 3):
            want[:, pages[b, place // 4], :, place % 4] = x[b, :32].reshape(2, 16)
    np.testing.assert_array_equal(cached, want)
    whole = (a.astype(np.float64) for a in (x, *want))
    np.testing.assert_allclose(got, by_torch(s, *whole, pages, np.array([11, 3])), atol=2e-5)


@pytest.mark.parametrize("window", few_emulated([0, 20], 0))
def test_page_that_is_not_there_ends_the_run(backend: str, window: int) -> None:
    """A page number that does not exist ends the run with an error, in attention that is split over
    positions and in attention of tiles.
    """
    pool = ark.tensor([5, 1, 8, 16])
    pages, at = ark.tensor([2, 3], ark.int32), ark.tensor([2], ark.int32)
    ark.paged_attention(ark.tensor([2, 32]), pool, pool, pages, at, window=window)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        pages.from_numpy(np.array([[4, 99, 99], [1, 77, 99]], np.int32))
        at.from_numpy(np.array([7, 8], np.int32))
        with pytest.raises(ark.GpuError, match=r"77.*out of range \(expected 0 to 4\)"):
            runtime.run()


def test_mismatched_shapes_are_refused() -> None:
    q, k = ark.tensor((2, 32)), ark.tensor((5, 1, 8, 16))
    pages, at = ark.tensor((2, 3), ark.int32), ark.tensor((2,), ark.int32)
    with pytest.raises(ModelError, match=r"expected \(pages, heads"):
        ark.paged_attention(q, ark.tensor((5, 8, 16)), k, pages, at)
    with pytest.raises(ModelError, match="must have one dtype and shape"):
        ark.paged_attention(q, k, ark.tensor((5, 1, 8, 16), ark.fp16), pages, at)
    with pytest.raises(ModelError, match=r"expected int32 \(sequences, most pages\)"):
        ark.paged_attention(q, k, k, ark.tensor((2, 3)), at)
    with pytest.raises(ModelError, match="one for each row of the table"):
        ark.paged_attention(q, k, k, pages, ark.tensor((1,), ark.int32))
    with pytest.raises(ModelError, match="3 rows do not fit 2 sequences"):
        ark.paged_attention(ark.tensor((3, 32)), k, k, pages, at)
    with pytest.raises(ModelError, match="paged_attention: the window is -1"):
        ark.paged_attention(q, k, k, pages, at, window=-1)
    with pytest.raises(ModelError, match=r"paged_attention: the sinks .* fp32 \(2,\)"):
        ark.paged_attention(q, k, k, pages, at, sinks=ark.tensor((3,)))
    with pytest.raises(ModelError, match="heads a multiple of 1"):
        ark.paged_attention(ark.tensor((2, 24)), k, k, pages, at)
    with pytest.raises(ModelError, match=r"expected \(rows, 16\)"):
        ark.paged_append(k, q, pages, at)


@pytest.mark.parametrize("position", few_emulated([24, -1, 2**31 - 1, -(2**31)], 24, -1))
@pytest.mark.parametrize("way", ["splits", "tiles", "many rows", "append"])
def test_position_that_is_not_there_ends_the_run(backend: str, way: str, position: int) -> None:
    """A position beyond the page table ends the run with an error that names it and the valid
    range. Nothing outside of the table is read.
    """
    pool, many = ark.tensor([5, 1, 8, 16]), way == "many rows"
    pages = ark.tensor([1 if many else 2, 3], ark.int32)
    at, rows = ark.tensor([1 if many else 2], ark.int32), 40 if many else 2
    if way == "append":
        ark.copy(ark.paged_append(pool, ark.tensor([rows, 16]), pages, at))
    else:
        window = 20 if way == "tiles" else 0
        ark.paged_attention(ark.tensor([rows, 32]), pool, pool, pages, at, window=window)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        pages.from_numpy(np.array([[0, 1, 2], [3, 4, 0]], np.int32)[: 1 if many else 2])
        at.from_numpy(np.array([7, position], np.int32)[-1 if many else 0 :])
        with pytest.raises(ark.GpuError, match=rf"index {position}, .*\(expected 0 to 23\)"):
            runtime.run()
