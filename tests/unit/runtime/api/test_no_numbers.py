"""Arguments that should be numbers but are not, or should be integers but have a fraction, are
refused and never rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark


def x(*shape: int) -> ark.Tensor:
    return ark.tensor(shape or (4, 8))


WRONG: dict[str, Callable[[], Any]] = {
    "a shape of halves": lambda: ark.tensor([1.5]),
    "a shape of words": lambda: ark.tensor(["4"]),
    "Dims": lambda: ark.Dims(2, 1.5),
    "Dims of letters": lambda: ark.Dims("ab"),
    "an axis": lambda: ark.reduce_sum(x(), 0.5),
    "an axis that is a word": lambda: ark.reduce_sum(x(), "a"),
    "axes": lambda: ark.reduce_sum(x(), [0, 0.5]),
    "a permutation": lambda: ark.transpose(x(), [0.5, 1]),
    "a reshape": lambda: ark.reshape(x(), [4.5, 8]),
    "how many are largest": lambda: ark.topk(x(), 1.5),
    "a pad": lambda: ark.pad(x(), [(1.5, 0), (0, 0)]),
    "a window": lambda: ark.avg_pool(x(1, 3, 8, 8), [2.5, 2]),
    "a constant": lambda: ark.constant("a", [2]),
    "a complex constant": lambda: ark.constant(1j, [2]),
    "a bound": lambda: ark.clip(x(), "a", "b"),
    "a rank": lambda: ark.set_rank(0.5),
    "a rank below 0": lambda: ark.set_rank(-1),
    "a world": lambda: ark.set_world_size(1.5),
    "a number of processes": lambda: ark.launch(1.5, print),
    "a lambda for other processes": lambda: ark.launch(1, lambda: None),
    "a NumPy type": lambda: ark.DataType.from_numpy("x"),
}


@pytest.mark.parametrize("name", WRONG)
def test_values_that_are_no_whole_numbers_are_refused(name: str) -> None:
    ark.init(backend="cpu")
    with pytest.raises((ark.InvalidUsageError, ark.ModelError)):
        WRONG[name]()
    assert (ark.Model.get_rank(), ark.Model.get_world_size()) == (0, 1)


def test_whole_numbers_of_any_type_are_taken() -> None:
    ark.init(backend="cpu")
    sizes = [np.int64(4), 8.0, np.float32(2)]
    assert list(ark.tensor(sizes).shape()) == [4, 8, 2]
    assert list(ark.reduce_sum(x(), np.int32(1)).shape()) == [4, 1]
