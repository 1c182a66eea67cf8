"""Plans, planner contexts and the profiler of ARK's interface, used as in ARK's scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.cli import main
from ark.plan.verify import verify
from ark.runtime.planner import plan_script


def test_empty_plans() -> None:
    plan = ark.Plan(None)
    assert (plan.rank, plan.world_size, plan.architecture) == (0, 1, "ANY")
    assert (plan.num_processors, plan.num_warps_per_processor) == (1, 1)
    assert plan.task_infos == plan.processor_groups == []
    data = {**json.loads(str(plan)), "WorldSize": 2, "NumProcessors": 4}
    reread = ark.Plan.from_str(json.dumps(data))
    assert reread.world_size == 2 and reread.num_processors == 4
    with pytest.raises(ark.InvalidUsageError):
        ark.Plan.from_str("not valid json {{{")
    with pytest.raises(ark.InvalidUsageError):
        ark.Plan.from_file("/nonexistent/plan.json")
    with pytest.raises(ark.PlanError):
        ark.Plan.from_str('{"phases": 3}')
    data["TaskInfos"] = [{"Id": 0}]
    with pytest.raises(ark.PlanError):
        ark.Plan(data)


def test_processor_ranges() -> None:
    a, b = ark.tensor([64, 64], ark.fp16), ark.tensor([64, 64], ark.fp16)
    machine = registry.machine("cpu-16")
    with ark.PlannerContext(processor_range=[0, 12]) as outer:
        assert json.loads(outer.dump()) == [{"processor_range": [0, 12]}]
        with ark.PlannerContext(processor_range=[0, 3], sync=False, config={"Tile": [8, 8]}):
            ark.add(a, b)
        with ark.PlannerContext(processor_range=[3, 8], warp_range=[0, 4]):
            ark.mul(a, b)
        with pytest.raises(ark.PlanError, match="not within"):
            ark.PlannerContext(processor_range=[8, 13]).__enter__()
    plan = ark.Planner(machine=machine).plan()
    (group,) = plan.processor_groups  # nested ranges, as in ARK
    assert [g["ProcessorRange"] for g in group["ResourceGroups"]] == [[0, 3], [3, 8]]
    assert plan.inner is not None
    used = {
        task.op: processor
        for processor, tasks in enumerate(plan.inner.phases[0].processors)
        for task in tasks
    }
    assert used[0] < 3 <= used[1] < 8
    assert len(plan.task_infos) == 2 and plan.num_processors == 16
    with pytest.raises(ark.PlanError, match="cpu-4 has 4, from 0 to 3"):
        ark.Planner(machine=registry.machine("cpu-4")).plan()


def test_plans_are_the_same_bytes() -> None:
    texts = []
    for _ in range(2):
        ark.init()
        x = ark.tensor([70, 64], name="x")
        y = ark.softmax(ark.matmul(x, x, transpose_other=True), name="y")
        texts.append(str(ark.Planner(machine=registry.machine("h100")).plan()))
        assert y.shape() == [70, 70]
    assert texts[0] == texts[1]


SCRIPT = """
import ark
ark.init()
x = ark.tensor([64, 64], ark.fp16)
y = ark.relu(ark.softmax(x), name="held")
if __name__ == "__main__":
    with ark.Runtime() as runtime:
        runtime.launch()
        raise RuntimeError("a script that is planned must not run")
"""


def test_script_is_planned_without_a_device(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    for machine in ("h100", "mi300x", "cpu-2"):
        (plan,) = plan_script(str(path), registry.machine(machine))
        verify([plan])
        assert [op.name for op in plan.ops] == ["softmax", "held"]
        assert plan.machine["name"] == machine
        kept = {b.name.split(".")[0] for b in plan.buffers if b.arena == "external"}
        assert kept == {"tensor", "held"}
    path.write_text("import ark\nx = ark.ones([4])\ny = ark.exp(x)\n")
    (plan,) = plan_script(str(path), registry.machine("cpu-1"))
    assert [b.arena for b in plan.buffers] == ["external"] * 2
    path.write_text("x = 1")
    with pytest.raises(ark.PlanError, match="no model"):
        plan_script(str(path), registry.machine("h100"))
    with pytest.raises(ark.InvalidUsageError):
        plan_script(str(tmp_path / "none.py"), registry.machine("h100"))
    for damaged in ("x = (", "x\0"):
        path.write_text(damaged)
        with pytest.raises(ark.InvalidUsageError, match=r"script\.py is not a valid Python script"):
            plan_script(str(path), registry.machine("h100"))


def test_script_that_ends_by_sys_exit_is_planned_where_that_means_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "script.py"
    text = "import sys, ark\ny = ark.exp(ark.ones([4]))\nsys.exit({})\n"
    for success in ("", "0", "None"):
        path.write_text(text.format(success))
        (plan,) = plan_script(str(path), registry.machine("cpu-1"))
        assert [op.name for op in plan.ops] == ["exp"]
    for failure, errors in ("3", "sys.exit(3)"), ("'no weights'", "sys.exit('no weights')"):
        path.write_text(text.format(failure))
        assert main(["plan", "--machine", "cpu-2", str(path)]) == 2
        assert errors in " ".join(capsys.readouterr().err.split())


def test_scripts_own_error_has_the_scripts_frames_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error of a user's script is shown with the script's frames and without ark's. An error
    about a file that the script opens is not taken for a missing script.
    """
    monkeypatch.chdir(tmp_path)
    text = "import ark\n\n\ndef read(x):\n    return {}\n\n\nread(ark.ones([4]))\n"
    for wrong, error in ("open('weights.bin')", "FileNotFoundError"), ("{}[0]", "KeyError"):
        Path("script.py").write_text(text.format(wrong))
        assert main(["plan", "--machine", "cpu-2", "script.py"]) == 2
        err = capfd.readouterr().err
        assert "ark: script.py raised an error of its own, " + error in err
        places = [line.split(", in ")[0] for line in err.splitlines() if line.startswith("  File")]
        assert places == ['  File "script.py", line 8', '  File "script.py", line 5']
    Path("script.py").write_text("import ark\nark.add(ark.ones([4]), ark.ones([5]))\n")
    assert main(["plan", "--machine", "cpu-2", "script.py"]) == 2
    assert capfd.readouterr().err.startswith("ark: add: shapes [4] and [5] do not broadcast")


def test_profiler_command_line() -> None:
    def call(*words: str) -> Any:
        command = [sys.executable, "-m", "ark.profiler", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    shown = call("--help")
    assert shown.returncode == 0 and "ARK Profiler" in shown.stdout
    missing = call()
    assert missing.returncode != 0 and "--plan" in missing.stderr
    wrong = call("--plan", "/nonexistent.json")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    "settings",
    [
        {"config": {"Tile": "8"}},
        {"config": {"Tile": [0, 8]}},
        {"config": {"NumWarps": 1000}},
        {"config": {"NoSuchThing": 1}},
        {"config": "Tile"},
        {"config": {"ImplType": "Fast"}},
        {"sync": "maybe"},
        {"processor_range": [0, "8"]},
        {"processor_range": [-1, 8]},
        {"processor_range": 8},
        {"config": {"NumTasks": 0}},
        {"warp_range": [4, 2]},
        {"sram_range": [0, 8, 0]},
    ],
)
def test_planner_contexts_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ark.InvalidUsageError):
        ark.PlannerContext(**settings)


def test_model_in_the_place_of_a_device_is_refused() -> None:
    with pytest.raises(ark.InvalidUsageError, match=r"device_id: .* is not a whole number"):
        ark.Planner(ark.Model(0, 1))  # type: ignore[arg-type]


def test_options_that_change_results_are_refused() -> None:
    with pytest.raises(ark.UnsupportedError, match="BatchStrideNC"):
        ark.PlannerContext(config={"BatchStrideNC": [1, 2]})
