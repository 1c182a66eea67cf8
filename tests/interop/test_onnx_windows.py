"""Sampling, Fourier transforms and pools in ONNX files, compared with torch, NumPy and onnx's
tests.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

import ark
from ark.interop.onnx.model import from_proto
from tests.cases.onnx_forms import FLOAT, INT64, n, network, same
from tests.interop.node_suite import run_case, selected
from tests.slow import slow

CASES = (
    "test_deform_conv_with_multiple_offset_groups",
    "test_roialign_aligned_false",
    "test_lppool_2d_dilations",
    "test_col2im_pads",
    "test_maxpool_with_argmax_2d_precomputed_strides",
    "test_maxunpool_export_with_output_shape",
    "test_gridsample_volumetric_bilinear_align_corners_1",
    "test_tensorscatter_circular",
    "test_stft_with_window",
)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@slow
@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_node_suite(name: str) -> None:
    (case,) = selected((name,))
    run_case(case)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_equals_torch(padding: str) -> None:
    """GridSample in all modes, with and without aligned corners, also at positions far outside of
    the image. Where ONNX's definition differs from torch's (cubic beyond a border), onnx's
    reference evaluator is used.
    """
    rng = np.random.default_rng(11)
    x = rng.standard_normal((2, 3, 5, 4)).astype(np.float32)
    grid = rng.uniform(-2.5, 2.5, (2, 6, 3, 2)).astype(np.float32)
    nodes, want = [], {}
    for mode in ("linear", "nearest", "cubic"):
        for corners in (0, 1):
            name = f"{mode}{corners}"
            words = {"mode": mode, "padding_mode": padding, "align_corners": corners}
            nodes.append(n("GridSample", ["x", "grid"], [name], **words))
            want[name] = torch.nn.functional.grid_sample(
                torch.from_numpy(x),
                torch.from_numpy(grid),
                {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode),
                padding,
                bool(corners),
            ).numpy()
    proto = network(
        nodes,
        {"x": (FLOAT, x.shape), "grid": (FLOAT, grid.shape)},
        {name: (FLOAT, a.shape) for name, a in want.items()},
        20,
    )
    if padding == "border":
        reference = ReferenceEvaluator(proto).run(["cubic0", "cubic1"], {"x": x, "grid": grid})
        want |= {"cubic0": reference[0], "cubic1": reference[1]}
    model = from_proto(proto)
    for (name, wanted), got in zip(want.items(), model(x, grid), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=2e-5, err_msg=name)
    model.close()


def test_transforms_equal_numpy() -> None:
    """Fourier transforms equal NumPy's: with lengths below and above the signal's, real and
    complex, one-sided and inverse.
    """
    rng = np.random.default_rng(13)
    real = rng.standard_normal((3, 12, 4, 1)).astype(np.float32)
    complex_parts = rng.standard_normal((3, 7, 4, 2)).astype(np.float32)
    z = complex_parts[..., 0] + 1j * complex_parts[..., 1]

    def parts(a: np.ndarray) -> np.ndarray:
        return np.stack([a.real, a.imag], -1).astype(np.float32)

    cases = {
        "r": ("real", 12, {}, parts(np.fft.fft(real[..., 0], axis=1))),
        "cut": ("real", 9, {}, parts(np.fft.fft(real[..., 0], 9, axis=1))),
        "one": ("real", 16, {"onesided": 1}, parts(np.fft.rfft(real[..., 0], 16, axis=1))),
        "c": ("both", 7, {}, parts(np.fft.fft(z, axis=1))),
        "i": ("both", 10, {"inverse": 1}, parts(np.fft.ifft(z, 10, axis=1))),
        "ir": ("both", 12, {"inverse": 1, "onesided": 1}, np.fft.irfft(z, 12, axis=1)[..., None]),
        "ir_odd": (
            "both",
            13,
            {"inverse": 1, "onesided": 1},
            np.fft.irfft(z, 13, axis=1)[..., None],
        ),
    }
    nodes = [
        n("DFT", [source, f"n_{name}", "axis"], [name], **words)
        for name, (source, _, words, _) in cases.items()
    ]
    proto = network(
        nodes,
        {"real": (FLOAT, real.shape), "both": (FLOAT, complex_parts.shape)},
        {name: (FLOAT, want.shape) for name, (_, _, _, want) in cases.items()},
        20,
        axis=np.array(1, np.int64),
        **{f"n_{name}": np.array(points, np.int64) for name, (_, points, _, _) in cases.items()},
    )
    model = from_proto(proto)
    for (name, case), got in zip(cases.items(), model(real, complex_parts), strict=True):
        np.testing.assert_allclose(got, case[3], rtol=1e-4, atol=1e-5, err_msg=name)
    model.close()


def test_short_transforms_equal_torch() -> None:
    rng = np.random.default_rng(17)
    x = rng.standard_normal((2, 100)).astype(np.float32)
    window = np.hanning(16).astype(np.float32)
    want = torch.stft(
        torch.from_numpy(x),
        16,
        5,
        window=torch.from_numpy(window),
        center=False,
        return_complex=True,
    )
    wanted = torch.view_as_real(want).transpose(1, 2).numpy()
    proto = network(
        [n("STFT", ["x", "step", "window"], ["y"])],
        {"x": (FLOAT, (2, 100, 1)), "window": (FLOAT, (16,))},
        {"y": (FLOAT, wanted.shape)},
        step=np.array(5, np.int64),
    )
    model = from_proto(proto)
    np.testing.assert_allclose(model(x[..., None], window)[0], wanted, rtol=1e-4, atol=1e-5)
    model.close()


def test_largest_elements_and_their_places() -> None:
    rng = np.random.default_rng(19)
    x = rng.permutation(2 * 3 * 7 * 6).reshape(2, 3, 7, 6).astype(np.float32)
    y, places = torch.nn.functional.max_pool2d(
        torch.from_numpy(x), 3, 2, 1, ceil_mode=True, return_indices=True
    )
    flat = places.numpy() + (np.arange(6) * 42).reshape(2, 3, 1, 1)
    words = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4, "ceil_mode": 1}
    proto = network(
        [n("MaxPool", ["x"], ["y", "i"], **words)],
        {"x": (FLOAT, x.shape)},
        {"y": (FLOAT, y.shape), "i": (INT64, y.shape)},
    )
    got, index = from_proto(proto)(x)
    np.testing.assert_array_equal(got, y.numpy())
    np.testing.assert_array_equal(index, flat)


def test_integers_are_ranked() -> None:
    x = np.array([[5, -3, 5, 2**40, 0], [1, 1, 1, 1, 1]], np.int64)
    for largest in (0, 1):
        nodes = [n("TopK", ["x", "k"], ["v", "i"], largest=largest)]
        outputs = {"v": (INT64, (2, 3)), "i": (INT64, (2, 3))}
        k = np.array([3], np.int64)
        same(network(nodes, {"x": (INT64, x.shape)}, outputs, k=k), x=x)


def test_compress_by_a_known_condition() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    proto = network(
        [n("Compress", ["x", "c"], ["y"], axis=1), n("Compress", ["x", "d"], ["z"])],
        {"x": (FLOAT, x.shape), "d": (TensorProto.BOOL, (5,))},
        {"y": (FLOAT, (3, "n")), "z": (FLOAT, ("m",))},
        c=np.array([True, False, True]),
    )
    same(proto, x=x, d=np.array([False, True, False, False, True]))
