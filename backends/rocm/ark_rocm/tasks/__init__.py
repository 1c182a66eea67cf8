"""The task bodies that are specialised for AMD GPUs: device functions that replace the
vendor-independent ones of ark/tasks. There is one object for each task kind and special case. The
dialect lists them.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark_rocm.tasks import (
    attention,
    attention_units,
    bulk,
    choose,
    experts,
    linear,
    linear_rows,
    linear_several,
    matmul,
    packet_rows,
)

BODIES: tuple[Body, ...] = (
    attention.OneRow(),
    attention.Merge(),
    attention.OneRowTiles(),
    attention_units.Units(),
    bulk.Bulk(),
    choose.EarlyChoice(),
    experts.Experts(),
    linear.OneRow(),
    linear_rows.OneRow(),
    linear_several.SeveralRows(),
    linear_several.SeveralRowsOfCodes(),
    matmul.Tiles(),
    packet_rows.Norm(),
    packet_rows.TopK(),
)
