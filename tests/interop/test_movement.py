"""torch functions that move elements, and those of angles and of bits, by torch.compile on the CPU,
compared with torch.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases.lookup import same

torch = pytest.importorskip("torch")


def test_operators_that_move_elements_equal_torch(capsys: pytest.CaptureFixture[str]) -> None:
    """Flips, rotations, windows and tensors of other sizes, by torch.compile, equal torch's."""

    def function(x: torch.Tensor, image: torch.Tensor) -> Any:
        turned = x.roll((2, -3), (0, 2)), x.roll(2, 1), x.roll(5), x.roll((1, 2), (1, 1))
        windows = x.unfold(1, 3, 2), x.unfold(-1, 4, 1), x.bfloat16().unfold(0, 4, 3)
        sized = [
            torch.nn.functional.interpolate(image, mode=mode, **size)
            for mode in ("nearest", "bilinear")
            for size in ({"scale_factor": 2}, {"size": (9, 4)}, {"size": (5, 14)})
        ]
        return *turned, *windows, *sized

    same(function, [torch.randn(4, 6, 8), torch.randn(2, 3, 5, 7)], capsys)


def test_operators_on_angles_and_bits_equal_torch(capsys: pytest.CaptureFixture[str]) -> None:
    def function(y: torch.Tensor, x: torch.Tensor, whole: torch.Tensor, by: torch.Tensor) -> Any:
        shifted = whole << by, whole >> by, whole.int() << 3, whole.int() >> by.int()
        functions = torch.bitwise_left_shift(whole, by), torch.bitwise_right_shift(whole, 2)
        return torch.atan2(y, x), *shifted, *functions

    y, x = torch.tensor([-1.5, -0.0, 0.0, 2.0])[:, None], torch.tensor([-3.0, -0.0, 0.0, 0.7])
    whole, by = torch.randint(-100, 100, (4, 5)), torch.randint(0, 20, (4, 5))
    same(function, [y.expand(4, 4).clone(), x.expand(4, 4).clone(), whole, by], capsys)
