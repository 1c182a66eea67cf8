"""`ark parallelize`: predictions compared with counts by hand, the search for the best plan, and
the page.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ark.backend import registry
from ark.cli import main
from ark.errors import InvalidUsageError, PlanError
from ark.ir.dtype import by_name
from ark.models.build import whole_pass
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config
from ark.parallel.page import page_data, render_page
from ark.parallel.plans.auto import best
from ark.parallel.plans.predict import NAMES, predict
from ark.parallel.plans.prediction import Target, Work
from ark.parallel.plans.splits import Splits
from ark.parallel.plans.stages import partition

NOAH = Path(__file__).parents[4] / "examples" / "noah"
BATCH_ROWS = 2048
SMALL = "llama-3.2-1b"


@pytest.fixture(scope="module")
def splits() -> Splits:
    return Splits(whole_pass(builtin_config(SMALL), by_name("bf16"), BATCH_ROWS))


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(registry.machine("h100"), 450.0, 50.0, 8)


def test_megatron_is_two_all_reduces_a_layer_and_two_for_its_gradients(
    splits: Splits, target: Target
) -> None:
    prediction = predict(splits, (4,), ("megatron",), target, Work(True, 1))
    hidden = 2048
    whole = BATCH_ROWS * hidden * 4
    volume = 2 * 3 / 4 * whole
    # Rings at 450 GB/s; each rank reads all partial sums of its quarter from memory at 3,079 GB/s
    # and writes their sum.
    us = 5 + volume / 450e3 + 5 * whole / 4 / 3079e3 + 4
    for cost in prediction.blocks:
        if cost.block.numbered:
            moves = [(m, c.backward) for c in cost.changes for m in c.moves]
            moved = [(m.op, m.bytes, backward) for m, backward in moves]
            assert sorted(moved) == [("all_reduce", volume, way) for way in (0, 0, 1, 1)]
            assert [m.us for m, _ in moves] == pytest.approx([us] * 4)


def test_parameters_and_states_are_adams(splits: Splits, target: Target) -> None:
    """With Adam, a bf16 parameter takes 16 bytes: itself, its gradient, an fp32 copy and two
    moments.
    """
    count = 1_235_814_400 + 32 * 2  # the model's parameters, and its frequencies in fp32
    for name, parts in (("data", (1, 1, 1)), ("zero1", (1, 1, 4)), ("zero2", (1, 4, 4)),
                        ("zero3", (4, 4, 4))):  # fmt: skip
        prediction = predict(splits, (4,), (name,), target, Work(True, 4))
        (held,) = prediction.memory
        for got, size, part in zip(
            (held.parameters, held.gradients, held.optimizer), (2, 2, 12), parts, strict=True
        ):
            assert got == pytest.approx(count * size / part, rel=1e-6)
        sent = 2 * 3 / 4 * count * 2
        assert prediction.synced_bytes == pytest.approx(sent, rel=1e-6)


def test_pipelines_share_blocks_and_keep_activations_in_flight(
    splits: Splits, target: Target
) -> None:
    one = predict(splits, (1,), ("replicated",), target, Work(True, 8))
    prediction = predict(splits, (4,), ("1f1b",), target, Work(True, 8))
    assert list(prediction.stage_of) == sorted(prediction.stage_of) and set(
        prediction.stage_of
    ) == {0, 1, 2, 3}
    assert one.us / 4 < prediction.us < one.us
    kept = [
        sum(
            b.saved_bytes
            for b, s in zip(prediction.blocks, prediction.stage_of, strict=True)
            if s == stage
        )
        for stage in range(4)
    ]
    assert [m.activations for m in prediction.memory] == [k * (4 - s) for s, k in enumerate(kept)]
    recomputed = predict(splits, (4,), ("1f1b",), target, Work(True, 8, recompute=True))
    assert recomputed.us > prediction.us and recomputed.peak < prediction.peak


@pytest.mark.parametrize("name", NAMES)
def test_every_plan_name_can_be_predicted(splits: Splits, target: Target, name: str) -> None:
    prediction = predict(splits, (4, 2), (name, "megatron"), target, Work(True, 8))
    assert 0 < prediction.us < 1e9 and all(m.total > 0 for m in prediction.memory)


def test_auto_is_as_good_as_every_name(splits: Splits, target: Target) -> None:
    limit = int(30e9)
    actual, tried = best(splits, 8, target, Work(True, 16), limit)
    assert actual is tried[0] and actual.peak <= limit
    fits = 0
    for names in itertools.product(("1f1b", "zero-bubble"), ("zero1", "zero2"), ("megatron",)):
        for mesh in ((2, 2, 2), (4, 1, 2), (1, 4, 2), (2, 1, 4)):
            try:
                prediction = predict(splits, mesh, names, target, Work(True, 16), limit)
            except PlanError:
                continue
            fits += 1
            assert actual.us <= prediction.us * 1.0001
    assert fits


def test_products_narrower_than_any_tile_are_predicted() -> None:
    """Predictions for a model on so many ranks that a rank's products have fewer columns than the
    narrowest tile.
    """
    small = Splits(whole_pass(Checkpoint.open(NOAH).config, by_name("bf16"), 32))
    target = Target(registry.machine("h100"), 450.0, 50.0, 8)
    for plan in ("data", "column", "megatron", "auto"):
        assert 0 < predict(small, (2,), (plan,), target, Work(True, 8)).us < 1e6


def test_stages_are_optimal() -> None:
    loads = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    for stages in (1, 2, 3, 4):
        actual = partition(loads, stages, [False] * 8)
        slowest = max(
            sum(x for x, s in zip(loads, actual, strict=True) if s == k) for k in range(stages)
        )
        every = [
            max(sum(loads[a:b]) for a, b in itertools.pairwise((0, *cut, 8)))
            for cut in itertools.combinations(range(1, 8), stages - 1)
        ]
        assert slowest == min(every)


@pytest.mark.parametrize(
    ("mesh", "names", "work", "says"),
    [
        ((4,), ("what",), Work(True, 8), "does not fit a mesh"),
        ((4, 2), ("1f1b",), Work(True, 8), "does not fit a mesh"),
        ((2, 2), ("1f1b", "gpipe"), Work(True, 8), "two pipelines"),
        ((4,), ("zero1",), Work(True, 6), "multiple of 4"),
        ((4,), ("zero1",), Work(False, 8), "for training"),
        ((32,), ("1f1b",), Work(True, 8), "stages"),
        ((2,), ("data",), Work(True, 0), "batch"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(
    splits: Splits, target: Target, mesh: Any, names: Any, work: Work, says: str
) -> None:
    with pytest.raises(InvalidUsageError, match=says):
        predict(splits, mesh, names, target, work)


def test_too_little_memory_is_refused(splits: Splits, target: Target) -> None:
    with pytest.raises(PlanError, match=r"GB per rank, but a rank has 1\.0"):
        predict(splits, (4,), ("data",), target, Work(True, 8), 10**9)
    with pytest.raises(PlanError, match="no plan over 2 ranks fits"):
        best(splits, 2, target, Work(True, 4), 10**9)


def test_script_in_place_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`ark parallelize` accepts a script in place of a checkpoint: here a perceptron with 131,072
    parameters, of which each rank holds half.
    """
    script, none = tmp_path / "model.py", tmp_path / "none.py"
    script.write_text(
        "import ark\n"
        "print('from the script')\n"
        "x, up = ark.tensor([64, 128], ark.bf16), ark.parameter([512, 128], ark.bf16)\n"
        "ark.linear(ark.relu(ark.linear(x, up)), ark.parameter([128, 512], ark.bf16))\n"
        "ark.Runtime().launch()\n"
    )
    words = ["--mesh", "2", "--machine", "h100", "--plan", "megatron", "--inference", "--json"]
    assert main(["parallelize", str(script), *words]) == 0
    (memory,) = json.loads(capsys.readouterr().out)["memory"]
    assert memory["parameters"] == 131072 * 2 // 2
    for plan in ("data", "1f1b"):  # without axes along which ops are split
        assert main(["parallelize", str(script), *words[:4], "--plan", plan, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plan"] == [plan]
    (tmp_path / "folder.py").mkdir()
    assert main(["parallelize", str(tmp_path / "folder.py"), *words]) == 2
    assert "is a directory; give a Python script" in capsys.readouterr().err
    none.write_text("x = 1\n")
    assert main(["parallelize", str(none), *words]) == 2
    assert "builds no model" in capsys.readouterr().err


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "plan.html"
    words = ["parallelize", SMALL, "--mesh", "2x4", "--machine", "h100", "--sequence", "512"]
    assert main([*words, "--plan", "1f1b,megatron", "--json", "--html", str(page)]) == 0
    errors = json.loads(capsys.readouterr().out)
    assert errors["mesh"] == [2, 4] and errors["plan"] == ["1f1b", "megatron"]
    assert errors["us"] > 0 and len(errors["memory"]) == 2 and len(errors["blocks"]) == 19
    data = json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text())[1]  # type: ignore[index]
    )
    assert (
        data["us"] == pytest.approx(errors["us"], abs=0.1) and data["placeOf"] == [0] * 4 + [1] * 4
    )
    assert 1 / 4 <= errors["work"]["share"] < 0.26
    repeated = sum(op["share"] for op in errors["work"]["replicated"])
    assert errors["work"]["share"] == pytest.approx((1 + 3 * repeated) / 4)
    assert main([*words, "--plan", "1f1b,megatron"]) == 0
    assert "each of 4 ranks that split ops does 25." in capsys.readouterr().out
    assert main([*words[:3], "2by4", *words[4:]]) == 2
    assert "is not a mesh" in capsys.readouterr().err
    assert main([*words, "--memory", "lots"]) == 2
    assert "number of bytes" in capsys.readouterr().err


def test_page_needs_nothing_from_outside_and_has_both_themes(
    splits: Splits, target: Target
) -> None:
    prediction = predict(splits, (2, 2), ("chimera", "auto"), target, Work(True, 4))
    evil = "</script><script>alert(1)</script>"
    html = render_page(prediction, evil)
    assert html == render_page(prediction, evil) and html.count("<script>") == 1
    outside = re.findall(r'(?:src|href)\s*=|@import|url\(|https?://[^"\s]*', html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    style = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]  # type: ignore[index]
    light = "".join(re.findall(r"color-scheme: light\) \{(.*?\})\n\}", style, re.DOTALL))
    dark = style.replace(light, "")
    used = set(re.findall(r"var\(--(\w+)\)", style)) | {"whole", "rows", "sums", "optimizer"}
    for theme in (dark, light):
        assert used <= set(re.findall(r"--(\w+):", theme))
    assert page_data(prediction, "x")["stages"] == [[0, 1], [0, 1]]


DOM = """
const made = {};
const context = new Proxy({}, { get: (t, k) => k in t ? t[k] : () => undefined, set: () => true });
const node = () => ({ style: {}, children: [], attributes: {}, setAttribute(k, v) {
  if (String(v).includes("NaN")) throw new Error(k + v); this.attributes[k] = v; },
  appendChild(c) { this.children.push(c); }, replaceChildren() { this.children = []; },
  addEventListener() {}, getContext: () => context,
  getBoundingClientRect: () => ({ width: 1200, height: 400, left: 0, top: 0 }) });
globalThis.document = { getElementById: (id) => made[id] ??= node(), createElementNS: node,
  documentElement: {} };
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "#000000" });
globalThis.addEventListener = () => {};
globalThis.devicePixelRatio = 1;
globalThis.innerWidth = 1200;
made.data = { textContent: require("fs").readFileSync(process.argv[2], "utf8") };
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the page's script")
@pytest.mark.parametrize("names", [("1f1b", "megatron"), ("interlaced", "auto"), ("zero3", "row")])
def test_script_draws(splits: Splits, target: Target, names: Any, tmp_path: Path) -> None:
    """Runs the page's script with a stub document that records calls: every figure is a number, and
    no exception is thrown.
    """
    prediction = predict(splits, (2, 2), names, target, Work(True, 4))
    html = render_page(prediction, "model")
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[-1]
    (tmp_path / "data.json").write_text(json.dumps(page_data(prediction, "model")))
    ends = "\nconsole.log(JSON.stringify([made.title.textContent, made.block.children.length]));"
    (tmp_path / "page.js").write_text(DOM + script.replace('"use strict";', "") + ends)
    ran = subprocess.run(
        ["node", tmp_path / "page.js", tmp_path / "data.json"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    title, drawn = json.loads(ran.stdout)
    assert title == "model" and drawn >= 2 * len(prediction.blocks[1].block.nodes)
