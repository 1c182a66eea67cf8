"""The measurements of `ark tune`, their storage, and their use by the planner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli import main
from ark.cli.measure.tune import candidates, chosen, products
from ark.lower.cuts import Cut
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime import cache, tuned
from ark.runtime.tuned import Choice

KEY = "1x1x96x80x64x4"


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def product_plan(cut: tuple[int, int, int] | None = None) -> Plan:
    """Returns the plan of a product of 96 x 80 x 64 for this CPU."""
    ark.init(backend="cpu")
    a, b = ark.tensor([96, 64], name="a"), ark.tensor([64, 80], name="b")
    ark.matmul(a, b)
    machine = registry.machine("cpu")
    options = {"cuts": {KEY: list(cut)}} if cut else tuned.options(machine)
    plan = make_plan(ark.Model.get_model().graph, machine, options)
    verify([plan])
    return plan


def test_choices_are_kept_and_planned_with(own_cache: Path) -> None:
    machine = registry.machine("cpu")
    usual = product_plan()
    assert tuned.options(machine) == {}
    other = next(c for c in candidates(products([usual])[0], machine)[1:])
    cut = (other.rows, other.columns, 1)
    tuned.KEPT.store(machine, {KEY: Choice(cut, 1.0, 2.0)})
    assert tuned.KEPT.load(machine) == {KEY: Choice(cut, 1.0, 2.0)}
    assert tuned.options(machine) == {"cuts": {KEY: list(cut)}}
    first, second = product_plan(), product_plan()
    assert first.ops[0].params["tile"] == list(cut[:2]) != usual.ops[0].params["tile"]
    assert to_json(first) == to_json(second)
    tuned.KEPT.forget(machine)
    assert to_json(product_plan()) == to_json(usual)


def test_cut_that_no_kernel_has_is_not_taken(own_cache: Path) -> None:
    assert to_json(product_plan((7, 11, 1))) == to_json(product_plan())


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b'{"format": 2, "machine": "x", "choices": {}}',
        b'{"format": 1, "machine": "x", "choices": {"1x1": {"cut": [1,1,1], "us": 1, '
        b'"usual_us": 1}}}',
        b'{"format": 1, "machine": "x", "choices": {"1x1x1x1x1x1": {"cut": [1,0,1], "us": 1, '
        b'"usual_us": 1}}}',
        b'{"format": 1, "machine": "x", "choices": {}, "more": 1}',
    ],
)
def test_invalid_files_are_not_used(own_cache: Path, capsys, text: bytes) -> None:
    machine = registry.machine("cpu")
    tuned.KEPT.store(machine, {})
    (name,) = (cache.folder() / cache.TUNED).iterdir()
    cache.store(cache.TUNED, name.name, text)
    assert tuned.KEPT.load(machine) == {}
    assert "ark tune --forget" in capsys.readouterr().err


def test_only_clearly_faster_choices_are_kept() -> None:
    usual, other, third = Cut(64, 64), Cut(32, 64), Cut(64, 32)
    times = [(1.00, usual), (0.98, other), (1.5, third)]
    assert chosen(times, usual) == Choice((64, 64, 1), 1.00e6, 1.00e6)
    times[1] = (0.9, other)
    assert chosen(times, usual) == Choice((32, 64, 1), 0.9e6, 1.00e6)
    assert chosen(times[1:], usual) == Choice((32, 64, 1), 0.9e6, 0.9e6)
    assert chosen([], usual) is None


def test_every_candidate_computes_the_product(own_cache: Path) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((96, 64)), rng.standard_normal((64, 80))
    listed = candidates(products([product_plan()])[0], registry.machine("cpu"))
    assert len(listed) > 4
    for cut in listed[::3]:
        tuned.KEPT.store(
            registry.machine("cpu"), {KEY: Choice((cut.rows, cut.columns, 1), 1.0, 1.0)}
        )
        ark.init(backend="cpu")
        a, b = ark.tensor([96, 64]), ark.tensor([64, 80])
        c = ark.matmul(a, b)
        with ark.Runtime() as runtime:
            runtime.launch()
            a.from_numpy(left.astype(np.float32))
            b.from_numpy(right.astype(np.float32))
            runtime.run()
            np.testing.assert_allclose(c.to_numpy(), left @ right, rtol=1e-4, atol=1e-4)


def test_command_measures_and_keeps(own_cache: Path, capsys) -> None:
    path = own_cache / "plan.json"
    path.write_text(to_json(product_plan()))
    assert main(["tune", str(path), "--backend", "cpu", "--repeats", "1"]) == 0
    out = capsys.readouterr()
    assert "96x80x64 nn fp32" in out.out and "96 x 80: " in out.err
    machine = registry.machine("cpu")
    assert list(tuned.KEPT.load(machine)) == [KEY]
    assert main(["tune", "--show", "--backend", "cpu"]) == 0
    assert KEY in capsys.readouterr().out
    assert main(["tune", "--forget", "--backend", "cpu"]) == 0
    assert tuned.KEPT.load(machine) == {}
    assert main(["tune", "--backend", "cpu"]) == 2
    assert main(["tune", "nothing", "--backend", "cpu"]) == 2
    assert "is neither a model" in capsys.readouterr().err
