"""`ark-rocm-emulator run`: kernels with arguments from files, and the messages for invalid
arguments and faulty kernels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ark_rocm_emulator.command import main, parser

from tests.kept import compile_hip

SOURCE = """
extern "C" __global__ __launch_bounds__(64) void add(const float* x, float* y, int n, double by) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  if (i < n) y[i] += x[i] * static_cast<float>(by);
}
extern "C" __global__ __launch_bounds__(64) void fill(int* to, long from) {
  to[blockIdx.x * 64 + threadIdx.x] = static_cast<int>(from) + threadIdx.x;
}
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "two.co"
    path.write_bytes(compile_hip(SOURCE, "gfx942", ("-O3",)))
    return path


def test_kernel_reads_and_writes_files(
    code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((4, 25)).astype(np.float32) for _ in range(2))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    files = [str(tmp_path / "x.npy"), f"+{tmp_path / 'y.npy'}"]
    run = ["run", str(code), "--kernel", "add", "--grid", "2", "--block", "64"]
    assert main([*run, *files, "int32=100", "float64=0.5"]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), y + x * np.float32(0.5))
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), x)
    assert "add on emulated gfx942: " in capsys.readouterr().out


def test_new_buffer_is_kept(code: Path, tmp_path: Path) -> None:
    kept = tmp_path / "to.npy"
    run = ["run", str(code), "--kernel", "fill", "--block", "64,1"]
    assert main([*run, f"{kept}=int32:64", "int64=-3"]) == 0
    np.testing.assert_array_equal(np.load(kept), np.arange(64, dtype=np.int32) - 3)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["int64=1"], "takes global_buffer of 8 bytes, by_value of 8 bytes; 1 arguments"),
        (["none.npy", "int64=1"], "none.npy cannot be read as an array"),
        (["int64=1", "int64=1"], "argument 0 of fill is global_buffer of 8 bytes"),
        (["to.npy=int32:64", "int32=1"], "argument 1 of fill is by_value of 8 bytes"),
        (["to.npy=int32:-1", "int64=1"], "expected FILE.npy=TYPE:COUNT"),
        (["to.npy=int32:64", "int64=x"], "expected TYPE=VALUE"),
        (["to.npy=int32:64", "long=1"], "neither a .npy file nor TYPE=VALUE"),
        (["--block", "64", "none/to.npy=int32:64", "int64=1"], "none/to.npy cannot be written"),
    ],
)
def test_arguments_that_do_not_fit(
    code: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(code), "--kernel", "fill", *words]) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["run", str(code), "--seed", "-1"])
    assert "'-1' is not a whole number from 0 to" in capsys.readouterr().err
    assert main(["run", str(code), "--kernel", "other"]) == 2
    assert "the code object has add, fill" in capsys.readouterr().err
    (tmp_path / "text.co").write_text("no code object")
    assert main(["run", "text.co"]) == 2
    assert "text.co cannot be run" in capsys.readouterr().err


def test_kernel_at_fault_is_stopped(
    code: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "to.npy"
    run = ["run", str(code), "--kernel", "fill", "--grid", "2", f"{kept}=int32:64", "int64=0"]
    assert main(run) == 1
    assert "fill was stopped (" in capsys.readouterr().err
    assert not kept.exists()


def test_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, parser().format_help().splitlines())) <= 80
