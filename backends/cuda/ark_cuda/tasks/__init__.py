"""Task bodies (device functions) that use NVIDIA's special units, such as matrix units and copy
units. The writer takes the first one in the list that supports a task's signature. Called through
the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark_cuda.tasks import (
    attention,
    attention_tiles,
    attention_units,
    bulk,
    exact,
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
    attention_tiles.Warpgroups(),
    attention_units.Units(),
    bulk.Bulk(),
    linear_roles.Roles(),
    linear.Slices(),
    linear_rows.Rows(),
    matmul.Warpgroups(),
    matmul.MmaTiles(),
    exact.ExactTiles(),
    grouped.Groups(),
    moves.Moves(),
    row_norm.RowStream(),
    switch.SwitchSum(),
)
