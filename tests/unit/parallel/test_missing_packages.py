"""If a package is missing, the error says so, and not that the plan or the algorithm is
impossible.
"""

from __future__ import annotations

import sys

import pytest

import ark
from ark.backend import registry
from ark.cli import main
from ark.errors import SystemError
from ark.frontend.model import Model, use_model
from ark.parallel.plans.coconet import autotune
from ark.parallel.plans.times import Rates
from ark.parallel.transform import ParallelGraph


@pytest.fixture
def without_ortools(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "ortools"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)


@pytest.mark.parametrize(
    "words",
    [
        ["parallelize", "llama-3.2-1b", "--mesh", "8", "--machine", "h100"],
        ["topo", "synthesize", "a100x2", "--collective", "all_gather", "--algorithm", "forestcoll"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_command_without_ortools_names_it(
    without_ortools: None, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(words) == 2
    errors = " ".join(capsys.readouterr().err.split())
    assert "needs the package ortools" in errors and "pip install" in errors
    assert "fits" not in errors and "is not an algorithm" not in errors


def test_missing_package_ends_the_search() -> None:
    def start() -> ParallelGraph:
        model = Model(0, 1)
        with use_model(model):
            ark.relu(ark.tensor((4, 4)))
        return ParallelGraph(model.graph, 1)

    def missing(plan: ParallelGraph) -> None:
        raise SystemError("the package is missing")

    with pytest.raises(SystemError, match="is missing"):
        autotune(start, {"search": missing}, Rates(1e5, 1e4, 5e4))


def test_machine_of_a_backend_that_is_broken_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(name: str) -> object:
        raise SystemError(f"the backend {name} cannot be imported")

    monkeypatch.setattr(registry, "get", get)
    with pytest.raises(ark.InvalidUsageError, match="the backend cpu cannot be imported"):
        registry.machine("h100")
