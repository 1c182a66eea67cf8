"""Task bodies (device functions) that use NVIDIA's special units, such as matrix units and copy
units. For each task, the source writer uses the first body in the list that supports the task's
signature (task kind, parameters and operand layouts). Called through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark_cuda.tasks import (
    attention,
    attention_gradient,
    attention_tiles,
    attention_units,
    bulk,
    exact,
    experts,
    grouped,
    linear,
    linear_roles,
    linear_rows,
    matmul,
    moves,
    row_norm,
    switch,
)

BODIES: tuple[Body, ...] = (
    attention.FromRing(),
    attention.Boxed(),
    attention.InPlace(),
    attention.PagesFromRing(),
    attention.BoxedPages(),
    attention.Paged(),
    attention.Merge(),
    attention_gradient.Units(),
    attention_tiles.Warpgroups(),
    attention_units.Units(),
    bulk.Bulk(),
    linear_roles.Roles(),
    linear.Slices(),
    linear_rows.Rows(),
    matmul.Warpgroups(),
    matmul.MmaTiles(),
    exact.ExactTiles(),
    experts.Ahead(),
    experts.Along(),
    experts.OnUnits(),
    grouped.Groups(),
    moves.Moves(),
    row_norm.RowStream(),
    switch.SwitchSum(),
)
