"""Figures of a whole model, extrapolated from plans with few of its layers, and the values that
`--layers` refuses.
"""

from __future__ import annotations

import dataclasses

import pytest

from ark.cli import main
from ark.cli.measure.decode import ContextFigures, Figures
from ark.cli.measure.scaled import scaled


def figures(layers: int) -> Figures:
    """Returns figures of a model with a head of 20 us and 100 bytes, layers of 3 us and 7 bytes
    each, and 4 us for the launch itself.
    """
    seconds, size = 20e-6 + layers * 3e-6, 100 + 7 * layers
    row = ContextFigures(512, seconds, [seconds], [layers], size, seconds - 4e-6)
    return Figures("block", 1, 0.5, 0.5, False, size, size, size, contexts=[row])


def test_tensors_shared_by_layers_are_counted_once() -> None:
    got = scaled(figures(2), figures(5), [2, 5], 32)
    want = dataclasses.replace(figures(32), contexts=got.contexts)
    assert got == want
    (row,) = got.contexts
    assert row.per_token == pytest.approx(20e-6 + 32 * 3e-6)
    assert row.runs == [pytest.approx(row.per_token)]
    assert row.further == pytest.approx(16e-6 + 32 * 3e-6)
    assert (row.read_bytes, row.tokens) == (100 + 7 * 32, [])


@pytest.mark.parametrize("layers", ["3", "3,1", "1,99", "1,2,3"])
def test_layers_beyond_the_model_are_refused(
    layers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "decode", "--model", "mi300x", "--layers", layers]) == 2
    assert "--layers" in capsys.readouterr().err


def test_option_layers_needs_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "--layers", "1,2"]) == 2
    assert "--model" in capsys.readouterr().err
