"""The attributes of gradients of max pools."""

from __future__ import annotations

from ark.ir.attributes import WindowAttributes


class UnpoolAttributes(WindowAttributes, frozen=True):
    """The windows of the max pool. image: the sizes of the image in each spatial dimension."""

    image: list[int]
