"""Convolutions that are rewritten to channels last, compared with torch. On processors with one
thread they are not rewritten.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.lower.rewrite import convolutions
from tests.cases.channels_last import keep_channels_last, scaled
from tests.opcheck import Case, check

pytestmark = pytest.mark.emulated("slow")

SHAPES: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 16, 9, 9), (16, 16, 3, 3), {"padding": 1}),
    ((1, 8, 12, 8), (24, 8, 3, 2), {"stride": 2, "padding": (1, 0)}),
    ((2, 8, 7, 7), (8, 8, 3, 3), {"dilation": 2}),
    ((1, 16, 40), (8, 16, 5), {"padding": 2}),
    ((3, 8, 8, 8), (32, 8, 1, 1), {"stride": 2}),
]


def test_convolutions_with_channels_last_equal_torch(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    with contextlib.closing(registry.get(backend).open(0)) as device:
        if not device.machine.cooperative:
            pytest.skip("the processors have one thread each")
    monkeypatch.setattr(convolutions, "least_work", lambda _: 1.0)
    ark.init(backend=backend)
    rng = np.random.default_rng(3)
    cases = []
    for number, (shape, kernel, options) in enumerate(SHAPES):
        dtype = ark.fp16 if number % 2 else ark.bf16
        arrays = [rng.uniform(-1, 1, s) for s in (shape, kernel, kernel[:1])]
        peer = getattr(torch.nn.functional, f"conv{len(shape) - 2}d")

        def expected(*given: np.ndarray, peer: Any = peer, options: Any = options) -> np.ndarray:
            return np.asarray(peer(*map(torch.from_numpy, given), **options).numpy())

        cases.append(
            Case(
                f"{shape} {kernel} {options}",
                [(a, dtype) for a in arrays],
                lambda x, w, b, o=options: ark.conv(x, w, b, **o),
                expected,
            )
        )
    check(cases)


DEPTHWISE: list[tuple[Any, Any, dict[str, Any]]] = [
    ((2, 16, 9, 9), (3, 3), {"padding": 1}),
    ((1, 24, 12, 8), (5, 3), {"stride": 2, "padding": (2, 0)}),
    ((2, 8, 15, 15), (7, 7), {"padding": 3}),
    ((2, 40, 10, 11), (3, 2), {"dilation": 2, "stride": (1, 3), "padding": (3, 1)}),
    ((2, 16, 5, 7), (1, 1), {}),
]


def test_depthwise_convolutions_with_channels_last_equal_torch(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks as networks for mobile devices have them: a depthwise convolution with a scale, a bias
    and an activation, a factor for each channel of each image, and a convolution of single pixels
    with a residual.
    """
    torch = pytest.importorskip("torch")
    with contextlib.closing(registry.get(backend).open(0)) as device:
        if not device.machine.cooperative:
            pytest.skip("the processors have one thread each")
    keep_channels_last(monkeypatch)
    ark.init(backend=backend)
    rng = np.random.default_rng(5)
    conv2d, cases = torch.nn.functional.conv2d, []
    for number, (shape, size, options) in enumerate(DEPTHWISE):
        dtype, channels = (ark.fp16 if number % 2 else ark.bf16), shape[1]
        shapes = [shape, (channels, 1, *size), (channels, 1, 1), (channels, 1, 1)]
        shapes += [(16, channels, 1, 1), (16, 16, 3, 3)]
        arrays = scaled(rng, shapes)

        def build(x: Any, w: Any, a: Any, b: Any, v: Any, u: Any, o: Any = options) -> Any:
            y = ark.conv(x, w, groups=int(x.shape()[1]), **o)
            y = ark.relu(ark.add(ark.mul(y, a), b))
            factor = ark.sigmoid(ark.reduce_mean(ark.reduce_mean(y, 3), 2))
            y = ark.conv(ark.mul(y, factor), v)
            return ark.add(ark.conv(y, u, padding=1), y)

        def expected(
            x: Any, w: Any, a: Any, b: Any, v: Any, u: Any, o: Any = options
        ) -> np.ndarray:
            x, w, a, b, v, u = map(torch.from_numpy, (x, w, a, b, v, u))
            y = torch.relu(conv2d(x, w, groups=x.shape[1], **o) * a + b)
            y = conv2d(y * torch.sigmoid(y.mean((2, 3), keepdim=True)), v)
            return np.asarray((conv2d(y, u, padding=1) + y).numpy())

        given = [(a, dtype) for a in arrays]
        cases.append(Case(f"{shape} {size} {options}", given, build, expected, tolerance=0.03))
    check(cases)


def test_norms_and_layers_between_depthwise_convolutions(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks as ConvNeXt has them: a depthwise convolution, a norm and two layers over channels
    between transposes, a scale and a residual. One tensor is read with channels first, too.
    """
    torch = pytest.importorskip("torch")
    with contextlib.closing(registry.get(backend).open(0)) as device:
        if not device.machine.cooperative:
            pytest.skip("the processors have one thread each")
    keep_channels_last(monkeypatch)
    ark.init(backend=backend)
    rng = np.random.default_rng(6)
    shapes = [(2, 16, 6, 5), (16, 1, 3, 3), (48, 16), (16, 48), (16, 1, 1), (16, 16, 2, 2)]
    arrays = scaled(rng, shapes)

    def build(x: Any, w: Any, up: Any, down: Any, scale: Any, last: Any) -> Any:
        total = x
        for _ in range(2):
            y = ark.transpose(ark.conv(x, w, padding=1, groups=16), [0, 2, 3, 1])
            y = ark.layernorm(y, eps=1e-5)
            y = ark.relu(ark.matmul(y, up, transpose_other=True))
            y = ark.matmul(y, down, transpose_other=True)
            x = ark.add(ark.mul(ark.transpose(y, [0, 3, 1, 2]), scale), x)
            total = ark.add(total, ark.reduce_sum(x, 1, keepdims=True))
        return ark.add(ark.conv(x, last), ark.conv(total, last))

    def expected(*given: np.ndarray) -> np.ndarray:
        x, w, up, down, scale, last = map(torch.from_numpy, given)
        conv2d, total = torch.nn.functional.conv2d, x
        for _ in range(2):
            y = conv2d(x, w, padding=1, groups=16).permute(0, 2, 3, 1)
            y = torch.nn.functional.layer_norm(y, (16,), eps=1e-5)
            y = torch.relu(y @ up.T) @ down.T
            x = y.permute(0, 3, 1, 2) * scale + x
            total = total + x.sum(1, keepdim=True)
        return np.asarray((conv2d(x, last) + conv2d(total, last)).numpy())

    check([Case("blocks", [(a, ark.fp16) for a in arrays], build, expected, tolerance=0.02)])


def test_concatenated_channels(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as DenseNet has them, in which each layer reads the channels of all earlier ones, as a
    list or as the previous concatenation and one more image. A concatenation reads one of the
    images twice, a convolution of windows also reads another one, and a third has channels first.
    """
    torch = pytest.importorskip("torch")
    with contextlib.closing(registry.get(backend).open(0)) as device:
        if not device.machine.cooperative:
            pytest.skip("the processors have one thread each")
    keep_channels_last(monkeypatch)
    ark.init(backend=backend)
    rng = np.random.default_rng(8)
    shapes = [(2, 16, 14, 10), (16, 16, 3, 3), (2, 8, 7, 5)]
    wide = [24, 40, 56]
    shapes += [s for c in wide for s in ((c, 1, 1), (16, c, 1, 1), (16, 16, 3, 3))]
    arrays = scaled(rng, [*shapes, (16, 16, 3, 3), (16, 120, 3, 3)])
    arrays[2] = rng.uniform(-1, 1, shapes[2])

    def network(m: Any, nested: bool, x: Any, w: Any, other: Any, given: Any) -> Any:
        pooled = m.max_pool(m.relu(m.conv(x, w)))
        images = [pooled, other]
        joined = m.concat(images)
        for i in range(len(wide)):
            shift, narrow, window = given[3 * i : 3 * i + 3]
            y = m.relu(m.conv(m.relu(joined + shift), narrow, 0))
            images.append(m.conv(y, window))
            joined = m.concat([joined, images[-1]] if nested else images)
        extra = m.conv(images[2], given[-2])
        return m.conv(m.concat([joined, extra, images[3], images[3]]), given[-1])

    class Ours:
        conv = staticmethod(lambda x, w, padding=1: ark.conv(x, w, padding=padding))
        relu, max_pool = staticmethod(ark.relu), staticmethod(lambda x: ark.max_pool(x, 2, 2))
        concat = staticmethod(lambda images: ark.concat(images, 1))

    class Torchs:
        conv = staticmethod(
            lambda x, w, padding=1: torch.nn.functional.conv2d(x, w, padding=padding)
        )
        relu = staticmethod(torch.relu)
        max_pool = staticmethod(lambda x: torch.nn.functional.max_pool2d(x, 2, 2))
        concat = staticmethod(lambda images: torch.cat(images, 1))

    def case(nested: bool) -> Case:
        def build(x: Any, w: Any, other: Any, *given: Any) -> Any:
            return network(Ours, nested, x, w, other, given)

        def expected(*arrays: Any) -> np.ndarray:
            x, w, other, *given = map(torch.from_numpy, arrays)
            return np.asarray(network(Torchs, nested, x, w, other, given).numpy())

        inputs = [(a, ark.fp16) for a in arrays]
        return Case(f"nested {nested}", inputs, build, expected, tolerance=0.02)

    check([case(False), case(True)])


def test_norms_of_few_long_rows(backend: str) -> None:
    """Norms of few long rows, such as the rows of group norms over large images. The mean of a row
    is large compared with the elements' differences from the mean.
    """
    torch = pytest.importorskip("torch")
    ark.init(backend=backend)
    rng = np.random.default_rng(7)
    cases = []
    for rows, dtype, offset in ((2, ark.bf16, 0.0), (3, ark.fp16, 3.0), (1, ark.fp32, 40.0)):
        array = rng.standard_normal((rows, 66000)) + offset

        def expected(x: np.ndarray) -> np.ndarray:
            rows_of = torch.from_numpy(x)
            return np.asarray(torch.nn.functional.layer_norm(rows_of, (66000,)).numpy())

        cases.append(
            Case(f"{dtype} {offset}", [(array, dtype)], lambda x: ark.layernorm(x, 1e-5), expected)
        )
    check(cases)


def test_pools_of_neighbouring_channels(backend: str) -> None:
    """Pools of channels-last images, whose windows have one element in the last dimension. Some
    images have a number of channels that is a multiple of a vector, others do not.
    """
    torch = pytest.importorskip("torch")
    ark.init(backend=backend)
    rng = np.random.default_rng(4)
    size, steps, margin = (3, 3, 1), (2, 1, 1), (1, 1, 0)
    cases = []
    for channels, dtype in ((16, ark.fp32), (16, ark.bf16), (6, ark.fp32)):
        array = rng.uniform(-1, 1, (1, 2, 7, 9, channels))
        array[0, 1, 3, 4] = np.nan
        array[0, 0, 0, :, 0] = -np.inf
        for name, run, peer in (
            (
                "max",
                lambda x: ark.max_pool(x, size, steps, margin),
                lambda x: torch.nn.functional.max_pool3d(x, size, steps, margin),
            ),
            (
                "mean",
                lambda x: ark.avg_pool(x, size, steps, margin),
                lambda x: torch.nn.functional.avg_pool3d(x, size, steps, margin),
            ),
            (
                "mean inside",
                lambda x: ark.avg_pool(x, size, steps, margin, count_include_pad=False),
                lambda x: torch.nn.functional.avg_pool3d(
                    x, size, steps, margin, count_include_pad=False
                ),
            ),
        ):
            values = array if name == "max" else np.nan_to_num(array, neginf=0.0)
            cases.append(
                Case(
                    f"{name} {channels} {dtype}",
                    [(values, dtype)],
                    run,
                    lambda x, peer=peer: peer(torch.from_numpy(x)).numpy(),
                )
            )
    check(cases)
