"""An index out of its dimension's range ends the run with an error, also where several indices are
combined to one offset. For valid indices results equal NumPy's.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark


def run(
    ids: list[list[int]], batch: int = 0, scatter: bool = False, shape: tuple[int, ...] = (3, 4)
) -> np.ndarray:
    """Returns the result of gather_nd at these index tuples, or of scatter_nd into a tensor of
    ones.
    """
    x, at = ark.tensor(list(shape)), ark.tensor(list(np.shape(ids)), ark.int64)
    if scatter:
        output = ark.scatter_nd(x, at, ark.constant(-1.0, [len(ids)]))
    else:
        output = ark.gather_nd(x, at, batch)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
        at.from_numpy(np.array(ids, np.int64))
        runtime.run()
        return output.to_numpy()


def test_tuples_within_the_range_equal_numpy(backend: str) -> None:
    ids = [[0, 3], [2, 0], [-1, -4], [1, -1]]
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(run(ids), x[tuple(np.array(ids).T)])


@pytest.mark.parametrize("ids", [[0, 4], [0, -5], [3, 0], [-4, 0], [1, 2**40]])
@pytest.mark.parametrize("scatter", [False, True])
def test_tuple_out_of_range_ends_the_run(backend: str, ids: list[int], scatter: bool) -> None:
    """An index tuple of which one index is out of range is refused, although the flat offset of the
    tuple is inside of the tensor.
    """
    with pytest.raises(ark.GpuError, match="out of range"):
        run([[1, 1], ids], scatter=scatter)


def test_index_of_another_batch_ends_the_run(backend: str) -> None:
    np.testing.assert_array_equal(run([[[1]], [[-1]], [[0]]], batch=1), [[1.0], [7.0], [8.0]])
    ark.init(backend=backend)
    with pytest.raises(ark.GpuError, match="out of range"):
        run([[[1]], [[4]], [[0]]], batch=1)
