"""The shared memory of tasks in the variant `matrix`: slabs, and behind them the stages that the
loading thread fills.
"""

from __future__ import annotations

STAGES_BYTES = 4 * 49152  # bytes of all stages; ARK_MATRIX_ROOM
# 16 by 64 results per warp, before the stages; bodies may use them for other data.
SLABS_BYTES = 8 * 2048
# Of a body with stages, with padding to a multiple of 1024.
SCRATCH_BYTES = STAGES_BYTES + SLABS_BYTES + 1024
