"""The formats of weights in checkpoints, with one file for each format. docs/quantization.md
describes how they are used and how to add one.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.errors import UnsupportedError
from ark.models.fields import Fields
from ark.models.formats import awq, bitsandbytes, compressed, fp8, gptq, mxfp4
from ark.models.formats.base import Format

READERS: dict[str, Callable[[Fields], Format]] = {
    "awq": awq.read,
    "bitsandbytes": bitsandbytes.read,
    "compressed-tensors": compressed.read,
    "fp8": fp8.read,
    "gptq": gptq.read,
    "mxfp4": mxfp4.read,
}
"""For each quant_method of quantization_config, the function that reads the format from the other
fields.
"""


def read_format(fields: Fields) -> Format | None:
    """The format that config.json describes in quantization_config; None if it does not have this
    field.
    """
    table = fields.table("quantization_config") or fields.table("compression_config")
    if table is None:
        return None
    method = table.text("quant_method")
    if method not in READERS:
        raise UnsupportedError(
            f"{table.source}: quant_method is {str(method)[:200]!r}, but ark reads quantised "
            f"weights of {', '.join(sorted(READERS))}. Use a checkpoint of one of these, or the "
            "one that is not quantised."
        )
    return READERS[method](table)
