"""AWQ's and GPTQ's packing of codes into 32-bit words, as in the code of their papers, written with
loops over bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tests.cases.quantized import Quantise, Tensors

GROUP_INPUTS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(codes: np.ndarray, bits: int, order: Sequence[int]) -> torch.Tensor:
    """Packs codes (n, m) into words (n, m * bits / 32). order: for each position in a word, the
    index of the code that is stored there.
    """
    parts = codes.astype(np.uint32).reshape(len(codes), -1, len(order))
    packed = np.zeros(parts.shape[:2], np.uint32)
    for place, code in enumerate(order):
        packed |= parts[..., code] << np.uint32(bits * place)
    return torch.from_numpy(packed.view(np.int32))


def coded(
    weight: np.ndarray, bits: int, symmetric: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantises a weight by groups of consecutive inputs. Returns codes (outputs, inputs), zero
    points and fp16 scales (both (outputs, groups)).
    """
    wide = weight.reshape(len(weight), -1, GROUP_INPUTS)
    steps = 2**bits - 1
    if symmetric:
        scales = 2 * np.abs(wide).max(-1) / steps
        scales = scales.astype(np.float16)
        zeros = np.full(scales.shape, 2 ** (bits - 1))
    else:
        scales = ((wide.max(-1) - wide.min(-1)) / steps).astype(np.float16)
        zeros = np.clip(np.rint(-wide.min(-1) / scales.astype(np.float32)), 1, steps)
    scaled = wide / scales.astype(np.float32)[..., None] + zeros[..., None]
    codes = np.clip(np.rint(scaled), 0, steps).reshape(weight.shape)
    return codes.astype(np.int64), zeros.astype(np.int64), scales


def valued(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns scale * (code - zero) in fp32."""
    wide = codes.reshape(len(codes), -1, GROUP_INPUTS) - zeros[..., None]
    return (wide * scales.astype(np.float32)[..., None]).reshape(codes.shape).astype(np.float32)


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Returns AWQ's 4-bit tensors, packed into words along the outputs, and the dequantised
    values.
    """
    codes, zeros, scales = coded(weight.numpy(), 4, False)
    pieces = {
        "qweight": words(codes.T, 4, AWQ_ORDER),
        "qzeros": words(zeros.T, 4, AWQ_ORDER),
        "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
    }
    return pieces, torch.from_numpy(valued(codes, zeros, scales))


def gptq(bits: int, symmetric: bool, ordered: bool) -> Quantise:
    """Returns a function that quantises a weight to GPTQ's tensors, with codes packed into words
    along the inputs. Stored zero points are 1 less than the actual ones.
    """

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        inputs = weight.shape[1]
        groups = np.arange(inputs) // GROUP_INPUTS
        if ordered:
            groups = np.random.default_rng(inputs).permutation(groups)
        order = np.argsort(groups, kind="stable")
        codes, zeros, scales = coded(weight.numpy()[:, order], bits, symmetric)
        values, own = np.empty_like(weight.numpy()), np.empty_like(codes)
        values[:, order], own[:, order] = valued(codes, zeros, scales), codes
        usual = range(32 // bits)
        pieces = {
            "qweight": words(own, bits, usual).T,
            "qzeros": words(zeros.T - 1, bits, usual),
            "scales": torch.from_numpy(np.ascontiguousarray(scales.T)),
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        return pieces, torch.from_numpy(values)

    return quantise
