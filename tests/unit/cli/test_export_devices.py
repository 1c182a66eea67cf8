"""`ark export` for GPUs: the program is C11 without extensions that gcc and zig compile under
-Werror. Tested are the message if there is no driver and the shipped model's tokens on an emulated
AMD device; for NVIDIA GPUs the program is only compiled. `nox` exports a network with a
small kernel; test_export.py covers the other parts of a decoder's program on the CPU.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ark.backend import registry
from ark.cli import main
from ark.cli.export.write import files, save
from ark.ir.dtype import DataType
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.plans import plans
from tests.slow import slow

NOAH = Path(__file__).resolve().parents[3] / "examples/noah"
PARTS = ("ark.c", "device.c", "safetensors.c")
PROGRAMS = {"noah": ("decoder.c", "generate.c"), "net": ("run.c",)}  # further C files of each
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1")
COMPILERS = {"gcc": ["gcc"], "zig": [sys.executable, "-m", "ziglang", "cc"]}
TARGETS = {"cuda": ("sm_90a", "h100"), "rocm": ("gfx942", "mi300x")}
EMULATED_PROCESSORS = 8  # compute units of the emulated device

# A library that is preloaded into the program. It creates an emulated device before the program
# searches for devices.
PRELOAD = r"""
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void begin(void) {
  void* library = dlopen(getenv("STAND_IN"), RTLD_NOW | RTLD_GLOBAL);
  const char* (*enter)(const char*, int, int) = NULL;
  if (library != NULL) *(void**)&enter = dlsym(library, "ark_emulator_enter");
  const char* why = enter == NULL ? dlerror() : enter("gfx942", 1, 60000000);
  if (why != NULL) {
    fprintf(stderr, "no emulated device: %s\n", why);
    exit(9);
  }
}
"""


def compiled(folder: Path, compiler: str, name: str = "noah") -> Path:
    """Returns the program that the compiler builds from a folder's C files."""
    if compiler == "gcc" and not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    if compiler == "zig" and not importlib.util.find_spec("ziglang"):
        pytest.skip("there is no ziglang")
    out = folder / f"{name}_{compiler}"
    parts = (*PARTS, *PROGRAMS[name], f"{name}.c", f"{name}_image.c")
    words = [*COMPILERS[compiler], *STRICT, *parts, "-o", out.name]
    done = subprocess.run([*words, "-ldl"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the program with the weights in its folder and these arguments."""
    (weights,) = program.parent.glob("*.safetensors")
    environment = {**os.environ, **variables}
    return subprocess.run(
        [str(program), str(weights), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=environment,
    )


@dataclass(frozen=True)
class Exported:
    folder: Path
    backend: str
    name: str  # a key of PROGRAMS


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((backend, name), marks=[slow] * (name == "noah"), id=f"{backend}-{name}")
        for backend in sorted(TARGETS)
        for name in PROGRAMS
    ],
)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    backend, name = request.param
    folder = tmp_path_factory.mktemp(f"{backend}-{name}")
    words = ["--backend", backend, "--arch", TARGETS[backend][0], "--name", name, "-o", str(folder)]
    if name == "noah":
        # With a chunk of one token no prompt kernel is compiled, which saves half of the test's
        # time.
        source = [str(NOAH), "--chunk", "1"]
    else:
        pytest.importorskip("onnx")
        graphs = pytest.importorskip("tests.interop.graphs")
        module, example = graphs.networks()["mlp"]
        source = [str(folder / "net.onnx")]
        graphs.export(module, example, Path(source[0]))
        (folder / "x.bin").write_bytes(example.numpy().tobytes())
    assert main(["export", *source, *words]) == 0
    return Exported(folder, backend, name)


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("zig", marks=slow)])
def test_without_a_driver_the_program_names_the_fix(exported: Exported, compiler: str) -> None:
    program = compiled(exported.folder, compiler, exported.name)
    if registry.get(exported.backend).probe().devices:
        pytest.skip("there is a device")
    files = exported.folder / "x.bin", exported.folder / "y.bin"
    done = run(program, *((4, 0) if exported.name == "noah" else files))
    assert done.returncode == 1 and not done.stdout
    assert ("error 10" in done.stderr and "was found" in done.stderr) or "not found" in done.stderr


def test_archive_of_a_device_needs_no_cxx(exported: Exported) -> None:
    """The static library for a GPU is built by a C compiler alone and contains the GPU's machine
    code.
    """
    folder, name = exported.folder, exported.name
    text = (folder / "CMakeLists.txt").read_text()
    assert "CXX" not in text and f"add_library({name} STATIC" in text and f"{name}_image.c" in text
    image = next(folder.glob(f"{name}_loop.*")).read_bytes()
    words = [int(w, 16) for w in _hex((folder / f"{name}_image.c").read_text())]
    assert b"".join(w.to_bytes(8, "little") for w in words)[: len(image)] == image
    assert image[:4] == b"\x7fELF"


def _hex(text: str) -> list[str]:
    body = text[text.index("{") + 1 : text.rindex("}")]
    return [w.strip().rstrip("u") for w in body.split(",") if w.strip()]


@slow
def test_tokens_on_an_emulated_device_are_those_of_generate(tmp_path: Path) -> None:
    from ark_rocm_emulator.device import _library

    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    _, stand_in = _library()
    noah, prompt, most = Checkpoint.open(NOAH), [0, 48, 79, 361, 1083], 3
    cpu = registry.get("cpu")
    with Generator(noah, cpu, cpu.open(0)) as generator:
        expected = list(generator.stream(prompt, most))
    machine = registry.machine("mi300x").with_processors(EMULATED_PROCESSORS)
    shape = Shape(noah.config, DataType.from_numpy(noah.dtype), 32, 4, 0, 1)
    plan = plans(shape, machine)[0]
    save(files(plan, registry.get("rocm"), "gfx942", "noah", noah, shape), tmp_path)
    program = compiled(tmp_path, "gcc")
    (tmp_path / "preload.c").write_text(PRELOAD)
    words = ["gcc", "-shared", "-fPIC", "-o", "preload.so", "preload.c", "-ldl"]
    subprocess.run(words, cwd=tmp_path, check=True)
    variables = {
        "LD_PRELOAD": str(tmp_path / "preload.so"),
        "STAND_IN": str(stand_in),
        "LD_LIBRARY_PATH": str(stand_in.parent),
    }
    done = run(program, most, *prompt, **variables)
    assert done.returncode == 0, done.stderr
    assert [int(word) for word in done.stdout.split()] == expected
    wrong = run(program, 1, 1 << 20, **variables)
    assert wrong.returncode == 1 and "the token 1048576" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (
            ["--backend", "rocm", "--arch", "sm_90a"],
            "has the architecture 'sm_90a'",
        ),
        (["--backend", "cuda", "--machine", "a100", "--arch", "sm_90a"], "is sm_80, not sm_90a"),
        (["--backend", "mesh"], "cannot run exported models"),
    ],
)
def test_unsupported_exports_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], messages: str
) -> None:
    if words[1] not in registry.names():
        pytest.skip(f"{words[1]} is not installed")
    assert main(["export", str(NOAH), *words, "-o", str(tmp_path / "o")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert any(part in text for part in messages.split("|")), text
    assert not (tmp_path / "o").exists()
