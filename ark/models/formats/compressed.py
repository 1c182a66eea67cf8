"""Weights in the format of the compressed-tensors package: fp8 and int8 with a scale for each
tensor, channel, group or block; int4 and int8 in words of 32 bits; NVFP4 and MXFP4.

quantization_config has groups of modules, each with a scheme. Scales of activations are not read,
because ark does not quantise activations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from ark.errors import UnsupportedError
from ark.ir.dtype import FLOAT_CODES, bf16, fp4, fp32, int4, int8
from ark.models.fields import Fields
from ark.models.formats.base import (
    FLOAT_SCALES,
    FLOATS,
    Piece,
    QuantizedTensor,
    by_blocks,
    choice,
    unpacked,
)
from ark.models.formats.layout import Array, Codes, Layout, group_for
from ark.models.formats.mxfp4 import codes_of, powers

PLAIN, PACKED = ("float-quantized", "int-quantized", "naive-quantized"), "pack-quantized"
NVFP4, MXFP4 = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
IGNORED = ("input_scale", "input_zero_point", "input_global_scale", "output_scale")


@dataclass(frozen=True)
class Scheme:
    """The scheme of one group of modules. targets: names of modules, patterns that begin with
    `re:`, or classes. block: the rows and columns that share a scale, 0 for all.
    """

    targets: tuple[str, ...]
    packing: str
    floats: bool
    bits: int
    block: tuple[int, int]
    symmetric: bool

    def names(self, module: str) -> bool:
        """True if a target matches the module's name. Targets that are classes are not compared."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else target == module
            for target in self.targets
        )

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes that a weight's scales may have."""
        if self.block == (0, 0):
            return ((), (1,), (1, 1))
        counts = [
            1 if not size else -(-n // size) for n, size in zip(shape, self.block, strict=True)
        ]
        return (tuple(counts),)


@dataclass(frozen=True)
class CompressedTensors:
    """The quantisation schemes of a checkpoint. A module uses the first scheme whose targets match
    its name. If no targets match, it uses the first scheme.
    """

    schemes: tuple[Scheme, ...]
    name: str = "compressed-tensors"

    def scheme(self, name: str) -> Scheme:
        """The scheme of the weight with this stored name."""
        module = name.removesuffix("weight").removesuffix(".")
        return next((s for s in self.schemes if s.names(module)), self.schemes[0])

    def pieces(self, name: str, shape: tuple[int, ...]) -> dict[str, Piece]:
        scheme, (outputs, inputs) = self.scheme(name), shape
        scales = scheme.scale_shapes(shape)
        pieces = {}
        if scheme.packing in PLAIN:
            pieces["weight"] = Piece(("F8_E4M3" if scheme.floats else "I8",), (shape,))
            pieces["weight_scale"] = Piece(FLOATS, scales)
            if not scheme.symmetric:
                pieces["weight_zero_point"] = Piece(("I8",), scales)
        elif scheme.packing == PACKED:
            per_word = 32 // scheme.bits
            pieces["weight_packed"] = Piece(("I32",), ((outputs, -(-inputs // per_word)),))
            pieces["weight_shape"] = Piece(("I64", "I32"), ((2,),))
            pieces["weight_scale"] = Piece(FLOATS, scales)
            if not scheme.symmetric:
                groups = scales[0][-1]
                packed = (-(-outputs // per_word), groups)
                pieces["weight_zero_point"] = Piece(("I32",), (packed,))
        else:
            types = ("F8_E4M3",) if scheme.packing == NVFP4 else ("U8", "F8_E8M0")
            pieces["weight_packed"] = Piece(("U8",), ((outputs, inputs // 2),))
            pieces["weight_scale"] = Piece(types, scales)
            if scheme.packing == NVFP4:
                pieces["weight_global_scale"] = Piece(("F32",), ((), (1,)))
        return pieces | {end: Piece((), (), False) for end in IGNORED}

    def layout(self, tensor: QuantizedTensor) -> Layout | None:
        scheme, inputs = self.scheme(tensor.name), tensor.shape[1]
        group = group_for(scheme.block[1] or inputs, inputs)
        if not group:
            return None
        if scheme.packing == NVFP4:
            return Layout(fp4, group, fp32)
        if scheme.packing == MXFP4:
            return Layout(fp4, group, bf16)
        codes = FLOAT_CODES if scheme.floats else int4 if scheme.bits == 4 else int8
        scales = FLOAT_SCALES[tensor.pieces["weight_scale"].dtype_code]
        return Layout(codes, group, scales, zeros=not scheme.symmetric)

    def decode(self, tensor: QuantizedTensor) -> Codes:
        scheme, (outputs, inputs) = self.scheme(tensor.name), tensor.shape
        scales, zeros = tensor.read("weight_scale"), None
        if scheme.packing in PLAIN:
            codes = tensor.read("weight")
            if not scheme.symmetric:
                zeros = tensor.read("weight_zero_point")
        elif scheme.packing == PACKED:
            if tensor.read("weight_shape").tolist() != [outputs, inputs]:
                raise tensor.wrong(f"weight_shape is not {[outputs, inputs]}")
            codes = _signed(tensor.read("weight_packed"), scheme.bits)[:, :inputs]
            if not scheme.symmetric:
                words = np.ascontiguousarray(tensor.read("weight_zero_point").T)
                zeros = _signed(words, scheme.bits)[:, :outputs].T
        else:
            codes = codes_of(tensor.read("weight_packed"))
            if scheme.packing == MXFP4:
                scales = powers(scales)
            else:
                scales = scales.astype(np.float32) / tensor.read("weight_global_scale").reshape(())
        return by_blocks(codes, scales, zeros, scheme.block)


def _signed(words: Array, bits: int) -> Array:
    """The signed codes in 32-bit words. The words store each code plus half of the codes' range, so
    that it is not negative.
    """
    return (unpacked(words, bits).astype(np.int16) - (1 << (bits - 1))).astype(np.int8)


def read(fields: Fields) -> CompressedTensors:
    """Reads the format from a quantization_config."""
    groups = fields.table("config_groups")
    if groups is None:
        raise fields.wrong("config_groups", "an object with a scheme of weights")
    if fields.get("kv_cache_scheme") is not None:
        raise UnsupportedError(
            f"{fields.source}: kv_cache_scheme asks for quantised keys and values, but ark keeps "
            "them in the weights' type. Use a checkpoint without it."
        )
    schemes = []
    for name in groups.values:
        group = groups.table(name)
        if group is not None and group.table("weights") is not None:
            schemes.append(_scheme(fields, group))
    if not schemes:
        raise fields.wrong("config_groups", "an object with a scheme of weights")
    return CompressedTensors(tuple(schemes))


def _scheme(fields: Fields, group: Fields) -> Scheme:
    weights = group.table("weights")
    assert weights is not None
    targets = group.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
        raise group.wrong("targets", "a list of names")
    for target in targets:
        _check_pattern(group, target)
    owner = group if group.get("format") else fields
    packing = str(choice(owner, "format", (*PLAIN, PACKED, NVFP4, MXFP4), None))
    floats = choice(weights, "type", ("int", "float"), "int") == "float"
    symmetric = weights.flag("symmetric", True)
    if packing == PACKED:
        choice(weights, "type", ("int",), "int")
        bits = choice(weights, "num_bits", (4, 8), None)
    elif packing in PLAIN:
        bits = choice(weights, "num_bits", (8,) if floats else (4, 8), None)
    else:
        bits = choice(weights, "num_bits", (4,), None)
    if str(weights.get("actorder")) == "group" and packing == PACKED:
        raise UnsupportedError(
            f"{weights.source}: actorder is 'group', but ark reads compressed-tensors with "
            "actorder 'weight' or none. Use a checkpoint with one of these."
        )
    if (floats or packing in (NVFP4, MXFP4)) and not symmetric:
        raise weights.wrong("symmetric", "true for floating-point weights")
    block = _block(weights)
    if packing in (NVFP4, MXFP4) and block[1] not in (16, 32):
        raise weights.wrong("group_size", "16 or 32")
    assert isinstance(bits, int)
    return Scheme(tuple(targets), packing, floats, bits, block, symmetric)


def _block(weights: Fields) -> tuple[int, int]:
    """The rows and columns that share a scale; 0 for all rows or columns."""
    usual = "group" if weights.get("group_size") else "tensor"
    strategies = ("tensor", "channel", "group", "tensor_group", "block")
    strategy = choice(weights, "strategy", strategies, usual)
    if strategy == "tensor":
        return (0, 0)
    if strategy == "channel":
        return (1, 0)
    if strategy != "block":
        return (1, weights.size("group_size"))
    return read_block(weights, "block_structure")


def read_block(fields: Fields, name: str) -> tuple[int, int]:
    """The rows and columns of a block of weights that share a scale."""
    block = fields.get(name)
    if (
        not isinstance(block, list)
        or len(block) != 2
        or any(type(n) is not int or n < 1 for n in block)
    ):
        raise fields.wrong(name, "a list of two positive integers")
    return (block[0], block[1])


def _check_pattern(group: Fields, target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error:
            raise group.wrong("targets", "a list of names and regular expressions") from None
