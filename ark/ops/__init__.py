"""One entry per op: shape rule, NumPy reference, cost, and how it becomes tile tasks."""
