"""Weights in the format of bitsandbytes. There are two kinds. In the kinds nf4 and fp4, a 4-bit
code selects one of 16 numbers in a table, which is multiplied by the largest magnitude of the
code's block. This magnitude may itself be quantised. The kind int8 has a scale for each row. The
numbers in the tables are not evenly spaced, so ark cannot multiply by 4-bit codes and dequantises
them when it loads the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ark.ir.dtype import fp32, int8
from ark.models.fields import Fields
from ark.models.formats.base import Floats, Piece, QuantizedTensor, choice
from ark.models.formats.layout import Array, Codes, Layout, group_for

ABSMAX, TABLE = "weight.absmax", "weight.quant_map"
NESTED, NESTED_TABLE = "weight.nested_absmax", "weight.nested_quant_map"
STATE = "weight.quant_state.bitsandbytes__"
ROW_SCALES = "SCB"
INT8_MOST = 127


@dataclass(frozen=True)
class BitsAndBytes:
    """kind: "nf4", "fp4" or "int8"."""

    kind: str

    @property
    def name(self) -> str:
        return f"bitsandbytes {self.kind}"

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        outputs, inputs = shape
        if self.kind == "int8":
            return {
                "weight": Piece(("I8",), (shape,)),
                ROW_SCALES: Piece(("F32",), ((outputs,),)),
                "weight_format": Piece((), (), False),
            }
        packed = -(-outputs * inputs // 2)
        return {
            "weight": Piece(("U8",), ((packed, 1), (1, packed))),
            ABSMAX: Piece((), ()),
            TABLE: Piece(("F32",), ((16,),)),
            STATE + self.kind: Piece((), ()),
            NESTED: Piece((), (), False),
            NESTED_TABLE: Piece(("F32",), ((256,),), False),
        }

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        inputs = tensor.shape[1]
        group = group_for(inputs, inputs) if self.kind == "int8" else 0
        return Layout(int8, group, fp32) if group else None

    def decode(self, tensor: QuantizedTensor) -> Codes | Floats:
        if self.kind == "int8":
            scales = tensor.read(ROW_SCALES)[:, None] / np.float32(INT8_MOST)
            return Codes(tensor.read("weight"), scales)
        state = self._state(tensor)
        count = int(np.prod(tensor.shape))
        pairs = tensor.read("weight").reshape(-1)
        codes = np.stack([pairs >> 4, pairs & 15], -1).reshape(-1)[:count]
        block = _size(tensor, state, "blocksize")
        most = self._absmax(tensor, state, -(-count // block))
        values = tensor.read(TABLE)[codes] * most.repeat(block)[:count]
        return values.reshape(tensor.shape).astype(np.float32)

    def _state(self, tensor: QuantizedTensor) -> dict[str, Any]:
        """The JSON object in the checkpoint that describes the weight."""
        try:
            state = json.loads(tensor.read(STATE + self.kind).tobytes())
        except (ValueError, KeyError, RecursionError):
            raise tensor.wrong(f"{STATE}{self.kind} is not JSON") from None
        if not isinstance(state, dict) or state.get("shape") != list(tensor.shape):
            raise tensor.wrong(f"{STATE}{self.kind} does not have its shape {list(tensor.shape)}")
        return state

    def _absmax(self, tensor: QuantizedTensor, state: dict[str, Any], blocks: int) -> Array:
        """The largest magnitude of each block."""
        most = tensor.read(ABSMAX).reshape(-1)
        if len(most) != blocks:
            raise tensor.wrong(f"{ABSMAX} has {len(most)} elements for {blocks} blocks")
        if most.dtype == np.float32:
            return most
        offset = state.get("nested_offset")
        if {NESTED, NESTED_TABLE} - set(tensor.pieces) or type(offset) not in (int, float):
            raise tensor.wrong(f"{ABSMAX} has 8 bits, without {NESTED}, its table or its offset")
        outer, block = tensor.read(NESTED), _size(tensor, state, "nested_blocksize")
        if most.dtype != np.uint8 or len(outer) != -(-blocks // block):
            raise tensor.wrong(f"{NESTED} does not fit {ABSMAX}")
        wide = outer.repeat(block)[:blocks]
        return np.asarray(tensor.read(NESTED_TABLE)[most] * wide + np.float32(offset))


def _size(tensor: QuantizedTensor, state: dict[str, Any], name: str) -> int:
    size = state.get(name)
    if type(size) is not int or size < 1:
        raise tensor.wrong(f"its {name} is {str(size)[:80]!r}, not a positive integer")
    return size


def read(fields: Fields) -> BitsAndBytes:
    """Reads the format from a quantization_config."""
    if fields.flag("load_in_8bit", False):
        return BitsAndBytes("int8")
    return BitsAndBytes(str(choice(fields, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")))
