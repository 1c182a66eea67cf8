"""Results of benches have one schema, and data that do not fit it are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ark.cli.bench_torch import figures_of
from ark.cli.measure.results import Results, encode, figure, read, results
from ark.runtime.cache import code_digest


def results_of(*figures: Any) -> Results:
    from ark.backend import registry

    backend, probe = registry.choose("cpu")
    machine = backend.machine("cpu-2")
    assert machine is not None
    return results(probe, 0, machine, ["bench", "ops", "add"], figures)


def test_results_name_machine_and_versions_and_are_read_back(tmp_path: Path) -> None:
    rows = [
        figure("ops/add", 2e-6, "torch", 3e-6, detail={"distance": float("nan"), "runs": (1, 2)}),
        figure("ops/sub", None, error="no such op"),
    ]
    path = tmp_path / "results.json"
    path.write_text(encode(results_of(*rows)))
    actual = read(path)
    assert actual.machine.backend == "cpu" and actual.machine.processors == 2
    assert {"ark", "Python", "numpy"} <= set(actual.versions)
    assert actual.source == code_digest()[:16] and actual.command == "ark bench ops add"
    first, second = actual.figures
    assert (first.us, first.peer_us, first.ratio) == pytest.approx((2.0, 3.0, 1.5))
    assert first.detail == {"distance": None, "runs": [1, 2]}
    assert second.us is None and second.error == "no such op"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"us": -1.0}, "us"),
        ({"us": None}, "expected a time"),
        ({"error": "failed"}, "expected a time"),
        ({"ratio": 2.0}, "ratio"),
        ({"ratio": None}, "ratio"),
        ({"peer": ""}, "peer"),
        ({"figure": ""}, "figure"),
        ({"figure": "<b>"}, "figure"),
        ({"speed": 1.0}, "speed"),
    ],
)
def test_invalid_results_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "results.json"
    data = json.loads(encode(results_of(figure("ops/add", 2e-6, "torch", 3e-6))))
    data["figures"][0].update(change)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message):
        read(path)


@pytest.mark.parametrize(
    ("key", "value"), [("commit", "main"), ("date", "today"), ("source", "x"), ("figures", None)]
)
def test_invalid_header_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "results.json"
    data = json.loads(encode(results_of(figure("ops/add", 2e-6))))
    data[key] = value
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"results.json.*{key}"):
        read(path)


def test_network_that_failed_is_a_figure_with_its_error() -> None:
    pytest.importorskip("torch")
    from ark.cli.measure.modules import ModuleFigures

    row = figures_of(ModuleFigures("bert", error="RuntimeError: no"))
    assert row.us is None and row.peer == "" and row.error == "RuntimeError: no"
    row = figures_of(ModuleFigures("bert", call=2e-5, peer=1e-5))
    assert (row.figure, row.peer, row.ratio) == ("torch/bert", "inductor", pytest.approx(0.5))
