"""The shared memory of tasks in the variant `matrix`: slabs, and behind them the stages that the
loading thread fills.
"""

from __future__ import annotations

ROOM = 4 * 49152  # bytes of all stages; ARK_MATRIX_ROOM
SLABS = 8 * 2048  # 16 by 64 results per warp, before the stages; bodies may use them for other data
SCRATCH = ROOM + SLABS + 1024  # of a body with stages, with padding to a multiple of 1024
