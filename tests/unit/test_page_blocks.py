"""Code blocks that no page's own test runs: each on one CPU, with the context of its page."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli import main
from tests.pages import python_blocks, shown

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ark.init(backend="cpu")
    yield
    ark.init(backend="cpu")


def block(page: str, part: str) -> str:
    (text,) = (b for b in python_blocks(page) if part in b)
    return text


def perceptron() -> ark.Model:
    """Returns the model that the plans of docs/parallel.md split: relu(x up^T) down^T."""
    with ark.use_model(ark.Model(0, 1)) as model:
        x, up, down = ark.tensor([8, 16]), ark.tensor([32, 16]), ark.tensor([16, 32])
        ark.linear(ark.relu(ark.linear(x, up)), down)
    return model


def test_mesh_is_a_backend_by_name() -> None:
    exec(block("mesh.md", "ark.init"), {"ark": ark})
    with ark.use_model():
        y = ark.relu(ark.constant(2.0, [4]))
        assert y.eval().tolist() == [2.0] * 4


def test_collectives_on_arrays_of_one_rank() -> None:
    space: dict[str, Any] = {}
    exec(block("channels.md", "ark.distributed.all_reduce"), space)
    np.testing.assert_array_equal(space["total"], np.ones(4099))


def test_mesh_of_ranks_is_planned_by_name() -> None:
    space = {"ark": ark, "model": perceptron(), "machine": registry.machine("cpu-2")}
    exec(block("parallel.md", '("data", "megatron")'), space)
    assert len(space["made"].ranks.graphs) == 8  # type: ignore[attr-defined]


def test_modules_of_the_page_of_models() -> None:
    space: dict[str, Any] = {"ark": ark, "Config": SimpleNamespace}
    exec(block("models.md", "class FeedForward"), space)
    layer = space["FeedForward"](SimpleNamespace(intermediate_size=8, hidden_size=4), ark.fp32)
    assert layer(ark.tensor([2, 4])).shape() == [2, 4]
    exec(block("models.md", "def prompt"), space)
    rows: list[int] = []
    model = SimpleNamespace(hidden=lambda state, count: rows.append(count))
    space["prompt"](model, ark.TokenState.make(8), 4)
    assert rows == [4]


def test_why_a_plan_chose_its_variant(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reasons for the choice of a kernel variant are printed also if the plan comes from the
    cache.
    """
    page = (ROOT / "docs/plan-decisions.md").read_text()
    blocks = re.findall(r"```console\n(.*?)```", page, re.S)
    calls = [line for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    plain = "ark plan examples/noah --machine h200"
    assert calls == [f"$ {plain} --variants", f"$ ARK_DEBUG=lower {plain}"]
    monkeypatch.chdir(ROOT)
    assert main(calls[0].split()[2:]) == 0
    out = capsys.readouterr().out
    monkeypatch.setenv("ARK_DEBUG", "lower")
    assert main(calls[1].split()[3:]) == 0
    err = capsys.readouterr().err
    for block, output in zip(blocks, (out, err), strict=True):
        assert shown(block.splitlines()[1:], output), output


# The number of blocks of each page, by the test that runs them. Commands in blocks are also checked
# against the parsers (tests/unit/test_docs.py).
RUN_BY = {
    "architecture.md": {"unit/test_docs.py": 1},
    "channels.md": {"multi/test_channels_page.py": 2, "unit/test_page_blocks.py": 1},
    "collective-programs.md": {
        "multi/test_program_page.py": 2,
        "unit/collective/test_collectives_page.py": 3,
    },
    "collectives.md": {"unit/collective/test_collectives_page.py": 3},
    "custom-ops.md": {"backend/test_custom_page.py": 2},
    "export.md": {"unit/cli/test_export.py": 1},
    "generate.md": {"serving/test_generate_page.py": 5},
    "kernel-variants.md": {"backend/test_vendors_page.py": 5},
    "mesh.md": {"unit/test_page_blocks.py": 1},
    "models.md": {"unit/test_page_blocks.py": 3},
    "networks.md": {"unit/test_page_blocks.py": 1},
    "new-decoder.md": {"backend/test_models_page.py": 8},
    "new-elementwise-op.md": {"unit/ops/test_new_op_page.py": 2},
    "new-engine.md": {"multi/test_engine_page.py": 2},
    "new-pass.md": {"unit/lower/test_pass_page.py": 3},
    "new-quantised-format.md": {"unit/models/test_format_page.py": 2},
    "onnx.md": {"interop/test_pages.py": 2},
    "parallel.md": {
        "unit/parallel/test_parallel_page.py": 4,
        "unit/parallel/test_written_plans.py": 1,
        "unit/parallel/plans/test_pipelined.py": 1,
        "unit/test_page_blocks.py": 1,
    },
    "pipelines.md": {"unit/parallel/test_parallel_page.py": 2},
    "plan-decisions.md": {"unit/test_page_blocks.py": 2},
    "predictions.md": {"unit/parallel/test_parallel_page.py": 1},
    "serve.md": {"server/test_serve_page.py": 5},
    "serving.md": {"serving/test_serving_page.py": 1},
    "start.md": {"unit/test_readme.py": 2, "unit/test_page_blocks.py": 2},
    "torch.md": {"interop/test_pages.py": 2},
    "training.md": {"backend/test_training_page.py": 1},
    "vendors.md": {"backend/test_vendors_page.py": 7},
}
NOT_RUN = {
    "calls-on-arrays.md": (1, "an error's text, which tests/multi/test_communicator.py asks for"),
    "emulator.md": (
        2,
        "tests/multi/test_generate_ranks.py and tests/rocm_emulator/test_command.py",
    ),
    "multi-node.md": (1, "installs packages"),
    "parallel.md": (1, "100 steps of training, in the session training_ranks"),
    "rocm-timing.md": (2, "takes minutes on the emulator"),
    "serve.md": (5, "starts a server or measures one, as tests/server/test_process.py and others"),
    "serving.md": (1, "a drawing"),
    "several-gpus.md": (1, "needs several GPUs"),
}


def test_each_block_of_a_page_is_run_by_a_test_or_has_a_reason() -> None:
    counted: Counter[str] = Counter({page: count for page, (count, _) in NOT_RUN.items()})
    for page, tests in RUN_BY.items():
        for test, count in tests.items():
            counted[page] += count
            text = (ROOT / "tests" / test).read_text()
            named = page in text or page.removesuffix(".md") in text
            assert named, f"{test} does not name {page}"
    pages = {p.name: p.read_text() for p in (ROOT / "docs").glob("*.md")}
    fences = {name: len(re.findall(r"^```\S*$", text, re.M)) for name, text in pages.items()}
    assert {name: count / 2 for name, count in fences.items() if count} == counted
    named = re.findall(r"tests/[\w/.]+\.py", " ".join(reason for _, reason in NOT_RUN.values()))
    assert all((ROOT / name).is_file() for name in named), named


def test_commands_of_the_page_for_beginners(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/start.md").read_text()
    first, second = re.findall(r"```bash\n(.*?)```", page, re.S)
    install, *calls = [*first.splitlines(), *second.splitlines()]
    assert install.endswith('.venv/bin/pip install -e ".[cpu]"')
    monkeypatch.chdir(ROOT)
    for call in calls:
        program, *words = shlex.split(call)
        assert program == ".venv/bin/ark"
        few = ["--backend", "cpu", "--max-new-tokens", "8"] if words[0] == "generate" else []
        assert main([*words, *few]) == 0
        assert len(capsys.readouterr().out.split()) > 3


def test_network_of_the_page_is_read(tmp_path: Path) -> None:
    page = (ROOT / "docs/networks.md").read_text()
    (text,) = re.findall(r"```json\n(.*?)```", page, re.S)
    (tmp_path / "network.json").write_text(text)
    network = ark.comm.topology.load(str(tmp_path / "network.json"))
    assert list(network.ranks) == ["g0", "g1"]
