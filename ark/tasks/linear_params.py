"""The static parameters of the task kind `linear`. ark.tasks.linear describes them, lowering sets
them, and the writers of device functions read them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ark.ir.epilogues import Epilogue
from ark.plan.params import Epsilon, Few, Params, Splits

StageRows = Annotated[int, msgspec.Meta(ge=1, le=64)]


class LinearParams(Params, frozen=True):
    rows: StageRows
    split_k: Splits
    prologue: Literal["none", "rmsnorm"]
    epilogue: Epilogue
    eps: Epsilon | None = None
    bias: bool = False
    heads: Few = 0
    kv_heads: Few = 0
    head_dim: Few = 0
    tiles: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    shares: Splits = 1
    share: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0
    ranks: Splits = 1
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0
