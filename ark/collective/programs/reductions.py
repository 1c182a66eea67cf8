"""Reductions of programs in NumPy: sum, product, max, min, mean, Adasum and the model combiner.

The executor runs these functions; tests and backends use them as the reference. Adasum is from
Maleki et al., "Scaling Distributed Training with Adaptive Summation" (MLSys 2021); the model
combiner is from GraphWord2Vec (Gill et al., "Distributed Training of Embeddings using Graph
Analytics", IPDPS 2021). Both depend on whole tensors, so a tensor can be cut only if its parts
exchange three dot products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.errors import InvalidUsageError, ModelError


@dataclass(frozen=True)
class Reduction:
    """How two arrays are combined.

    Data of `elementwise` reductions may be cut and reordered freely. The other reductions need
    whole tensors and a fixed order of the ranks: a balanced tree (Adasum) or a left fold (the
    combiner).
    """

    name: str
    elementwise: bool
    combine: Callable[[np.ndarray, np.ndarray], np.ndarray]


def dot_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns [a.b, a.a, b.b] in fp64, shape (3,). A product beyond fp64's range is infinite."""
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    with np.errstate(over="ignore", invalid="ignore"):
        return np.array([x @ y, x @ x, y @ y])


def coefficients(name: str, dots: np.ndarray) -> tuple[float, float]:
    """Returns the factors of a and b for dots = [a.b, a.a, b.b]. The factor of an array with norm 0
    is 1.
    """
    ab, aa, bb = (float(v) for v in dots)
    if not np.isfinite((ab, aa, bb)).all():
        raise ModelError(
            f"{name}: the dot products of two ranks' tensors are {ab:g}, {aa:g} and {bb:g}; they "
            "must be finite in fp64: scale the tensors down, and remove infinities and NaN"
        )
    if name == "adasum":
        return (1 - ab / (2 * aa) if aa else 1.0), (1 - ab / (2 * bb) if bb else 1.0)
    if name == "combiner":
        return (1 - ab / aa if aa else 1.0), 1.0
    raise InvalidUsageError(f"{name} has no coefficients; only adasum and combiner have.")


def blend(name: str, a: np.ndarray, b: np.ndarray, dots: np.ndarray) -> np.ndarray:
    """Returns ca * a + cb * b in the dtype of `a`, computed in fp64."""
    if not np.issubdtype(np.result_type(a.dtype, np.float16), np.floating) or a.dtype.kind in "iub":
        raise InvalidUsageError(
            f"{name} scales vectors, so it needs floating-point data, but got {a.dtype}."
        )
    ca, cb = coefficients(name, dots)
    return (ca * a.astype(np.float64) + cb * b.astype(np.float64)).astype(a.dtype)


def _whole(name: str) -> Reduction:
    def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        if a.dtype != np.float64:  # products of smaller types cannot overflow fp64
            return blend(name, a, b, dot_products(a, b))
        # The returned factors do not depend on the tensors' scale. Both tensors are scaled to a
        # magnitude of 1, so that products do not overflow.
        largest = max(np.abs(a).max(initial=0.0), np.abs(b).max(initial=0.0))
        scale = largest if 0 < largest < np.inf else 1.0
        return scale * blend(name, a / scale, b / scale, dot_products(a / scale, b / scale))

    return Reduction(name, False, combine)


REDUCTIONS: dict[str, Reduction] = {
    "sum": Reduction("sum", True, np.add),
    "product": Reduction("product", True, np.multiply),
    "max": Reduction("max", True, np.maximum),
    "min": Reduction("min", True, np.minimum),
    "mean": Reduction("mean", True, np.add),
    "adasum": _whole("adasum"),
    "combiner": _whole("combiner"),
}


def divided(array: np.ndarray, divide: int) -> np.ndarray:
    """The result of a mean: array / divide in the array's dtype. Integers are rounded towards minus
    infinity.
    """
    if divide == 1:
        return array
    divisor = array.dtype.type(divide)
    quotient: np.ndarray = array // divisor if array.dtype.kind in "iu" else array / divisor
    return quotient.astype(array.dtype)


def reference(name: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The reference result of a reduction over ranks, computed directly from one array per rank.
    The order is rank order or, for Adasum, pairs of ranks, then pairs of pairs. Raises
    InvalidUsageError for an unknown name, and for Adasum over a number of ranks that is not a power
    of two.
    """
    if name not in REDUCTIONS:
        raise InvalidUsageError(
            f"{name!r} is not a reduction; choose one of {', '.join(REDUCTIONS)}."
        )
    combine = REDUCTIONS[name].combine
    if name == "adasum":
        require_power_of_two(len(arrays))
        level = list(arrays)
        while len(level) > 1:
            level = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]
    total = functools.reduce(combine, arrays)
    return divided(total, len(arrays)) if name == "mean" else total


def require_power_of_two(ranks: int) -> None:
    """Raises InvalidUsageError unless `ranks` is a power of two, as Adasum needs."""
    if ranks < 1 or ranks & (ranks - 1):
        raise InvalidUsageError(
            "Adasum combines ranks in pairs of pairs and needs a power of two, but there are "
            f"{ranks} ranks; reduce over {1 << max(ranks.bit_length() - 1, 0)} of them or use mean."
        )
