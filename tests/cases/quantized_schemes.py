"""Schemes of compressed-tensors by name, and weights that the package compresses with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases.quantized import Quantise, Tensors

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    ),
    "int8-channel": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8-channel-asymmetric": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "int4-group": ("pack-quantized", GROUP),
    "int4-group-asymmetric": ("pack-quantized", {**GROUP, "symmetric": False}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
    ),
}


def scales_of(
    weight: torch.Tensor, scheme: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns a weight's scales and zero points, from the largest and the smallest value of each
    group.
    """
    outputs, inputs = weight.shape
    strategy = scheme["strategy"]
    rows, columns = {"tensor": weight.shape, "channel": (1, inputs), "block": (128, 128)}.get(
        strategy, (1, scheme.get("group_size"))
    )
    size = (-(-outputs // rows), -(-inputs // columns))
    pad = (0, size[1] * columns - inputs, 0, size[0] * rows - outputs)
    wide = torch.nn.functional.pad(weight, pad).reshape(size[0], rows, size[1], columns)
    most, least = wide.amax((1, 3)), wide.amin((1, 3))
    if not scheme.get("symmetric", True):
        steps = 2 ** scheme["num_bits"] - 1
        scale = (most - least).clamp_min(1e-6) / steps
        zero = (-(steps + 1) / 2 - least / scale).round().clamp(-(steps + 1) // 2, steps // 2)
        return scale, zero.to(torch.int8)
    limit = {"float": {8: 448.0, 4: 6.0}, "int": {8: 127.0, 4: 7.0}}
    largest = torch.maximum(most.abs(), least.abs()).clamp_min(1e-6)
    scale = largest / limit[scheme["type"]][scheme["num_bits"]]
    return (scale.reshape(1) if strategy == "tensor" else scale), None


def compressed(name: str) -> tuple[Quantise, dict[str, Any]]:
    """Returns a function that compresses and decompresses by the package, and the
    quantization_config.
    """
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    packing, fields = COMPRESSED[name]
    args = QuantizationArgs(**fields)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(packing)

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale, zero = scales_of(weight, fields)
        state = {"weight": weight, "weight_scale": scale}
        if zero is not None:
            state["weight_zero_point"] = zero
        if name == "nvfp4":
            state["weight_global_scale"] = 448.0 / scale.max().reshape(1)
            scale = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
            state["weight_scale"] = scale
        if name == "mxfp4":
            state["weight_scale"] = 2.0 ** scale.log2().ceil()
        pieces = compressor.compress(dict(state), scheme)
        if name != "nvfp4":
            return pieces, compressor.decompress(dict(pieces), scheme)["weight"].float()
        # decompress rounds to bf16, so the values are computed from the unpacked codes in fp32.
        codes = unpack_fp4_from_uint8(pieces["weight_packed"], *weight.shape, dtype=torch.float32)
        wide = (scale / state["weight_global_scale"]).repeat_interleave(16, 1)
        return pieces, codes * wide

    group = {"targets": ["Linear"], "weights": fields, "input_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": packing,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return quantise, config
