"""Custom ops that several tests use. Each has its device code as text, a signature and a NumPy
reference.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import ark

SCALE = """
// Rows times a row and a constant.
template <class Task, class X, class W, class Y>
ARK_DEVICE void scale(ArkCtx& c, const Task& task, X x, W w, Y y) {
  for (int m = task.m.begin; m < task.m.end; ++m) {
    for (int k = ark_tid(); k < task.k.size; k += ARK_THREADS) {
      ark_store(c, y, ark_load(c, x, m, k) * ark_load(c, w, k) * Task::by, m, k);
    }
  }
}
"""

BLUR = """
#define NEIGHBOURS 1
// The mean of a row's elements and of those of the rows beside it that there are.
ARK_DEVICE float mean(float total, int count) { return total / static_cast<float>(count); }
template <class Task, class X, class Y>
ARK_DEVICE void blur(ArkCtx& c, const Task& task, X x, Y y) {
  constexpr int rows = decltype(task.m)::size;
  const int wide = task.k.end - task.k.begin;
  for (int i = ark_tid(); i < (task.m.end - task.m.begin) * wide; i += ARK_THREADS) {
    const int m = task.m.begin + i / wide, k = task.k.begin + i % wide;
    float total = 0.0f;
    int count = 0;
    for (int at = m - NEIGHBOURS; at <= m + NEIGHBOURS; ++at) {
      if (at < 0 || at >= rows) continue;
      total += ark_load(c, x, at, k);
      ++count;
    }
    ark_store(c, y, mean(total, count), m, k);
  }
}
"""

SHARES = """
#define SQUARED(v) ((v) * (v))
// A row's squares as shares of their sum, and the sum: by way of shared memory.
template <class Task, class X, class Y, class S>
ARK_DEVICE void shares(ArkCtx& c, const Task& task, X x, Y y, S sums) {
  float* squares = reinterpret_cast<float*>(ARK_SCRATCH(c));
  for (int m = task.m.begin; m < task.m.end; ++m) {
    float mine = 0.0f;
    for (int k = ark_tid(); k < task.k.size; k += ARK_THREADS) {
      squares[k] = SQUARED(ark_load(c, x, m, k));
      mine += squares[k];
    }
    const float sum = ark_block_sum(mine, squares + decltype(task.k)::size);
    for (int k = ark_tid(); k < task.k.size; k += ARK_THREADS) {
      ark_store(c, y, squares[k] / sum, m, k);
    }
    if (ark_tid() == 0) ark_store(c, sums, sum, m);
    ark_sync();
  }
}
"""

COUNT_UP = """
// Adds to a counter for each element; of whole numbers.
template <class Task, class X, class T>
ARK_DEVICE void count_up(ArkCtx& c, const Task& task, X x, T total) {
  for (int m = task.m.begin + ark_tid(); m < task.m.end; m += ARK_THREADS) {
    *ark_address(total, m) += Task::twice ? 2 * *ark_address(x, m) : *ark_address(x, m);
  }
}
"""


def shares_in_numpy(x: Any) -> tuple[Any, Any]:
    squares = x * x
    sums = squares.sum(-1)
    return squares / sums[:, None], sums


def blur_in_numpy(x: Any) -> Any:
    beside = np.pad(x, ((1, 1), (0, 0)))
    count = np.pad(np.ones(len(x)), 1)
    return (beside[:-2] + x + beside[2:]) / (count[:-2] + 1 + count[2:])[:, None]


def scale() -> ark.ops.custom.CustomOp:
    return ark.custom_op(
        "scale",
        SCALE,
        "x[m, k], w[k] -> y[m, k]",
        tile={"m": 4},
        constants={"by": 2.0},
        reference=lambda x, w, by: x * w * by,
        packets=["x", "y"],
    )


def blur() -> ark.ops.custom.CustomOp:
    return ark.custom_op(
        "blur",
        BLUR,
        "x[m+-1, k] -> y[m, k]",
        tile={"m": 3, "k": 7},
        reference=blur_in_numpy,
        packets=["x", "y"],
    )


def shares() -> ark.ops.custom.CustomOp:
    return ark.custom_op(
        "shares",
        SHARES,
        "x[m, k] -> y[m, k], sums[m]",
        tile={"m": None},
        dtypes={"sums": ark.fp32},
        scratch=256,  # one float per warp, for every vendor
        scratch_each={"k": 4},
        reference=shares_in_numpy,
    )


def count_up() -> ark.ops.custom.CustomOp:
    return ark.custom_op(
        "count_up",
        COUNT_UP,
        "x[m], total[m] -> total[m]",
        tile={"m": 64},
        constants={"twice": bool},
        dtypes={"x": (ark.int32, ark.int64), "total": (ark.int32, ark.int64)},
    )
