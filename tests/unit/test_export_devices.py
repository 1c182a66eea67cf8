"""`ark export` for devices with drivers of their own: C11 without extensions that gcc and zig take
under -Werror, the words where there is no driver, and the shipped model's tokens on an emulated AMD
device. For NVIDIA GPUs it is compiled only.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ark.backend import registry
from ark.cli import main
from ark.export.write import files, save
from ark.ir.dtype import DataType
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.plans import plans
from tests.slow import slow

NOAH = Path(__file__).resolve().parents[2] / "examples/noah"
PARTS = ("ark.c", "device.c", "safetensors.c", "decoder.c", "generate.c")
STRICT = ("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1")
COMPILERS = {"gcc": ["gcc"], "zig": [sys.executable, "-m", "ziglang", "cc"]}
TARGETS = {"cuda": ("sm_90a", "h100"), "rocm": ("gfx942", "mi300x")}
PROCESSORS = 8  # an emulated device has so many compute units

# Gives the program an emulated device before it looks for one.
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


def compiled(folder: Path, compiler: str) -> Path:
    """The program, made by the compiler from a folder's C files."""
    if compiler == "gcc" and not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    if compiler == "zig" and not importlib.util.find_spec("ziglang"):
        pytest.skip("there is no ziglang")
    out = folder / f"generate_{compiler}"
    words = [*COMPILERS[compiler], *STRICT, *PARTS, "noah.c", "noah_image.c", "-o", out.name]
    done = subprocess.run([*words, "-ldl"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, *numbers: int, **variables: str) -> subprocess.CompletedProcess[str]:
    words = [str(program), str(program.parent / "noah.safetensors"), *map(str, numbers)]
    environment = {**os.environ, **variables}
    return subprocess.run(
        words, capture_output=True, text=True, timeout=250, check=False, env=environment
    )


@pytest.fixture(scope="module", params=sorted(TARGETS))
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    arch = TARGETS[request.param][0]
    words = ["export", str(NOAH), "--backend", request.param, "--arch", arch, "--name", "noah"]
    # Prompts a token at a time need no kernels of their own, which take half of the time.
    assert main([*words, "--chunk", "1", "-o", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("compiler", ["gcc", pytest.param("zig", marks=slow)])
def test_without_a_driver_the_program_says_what_to_do(exported: Path, compiler: str) -> None:
    program = compiled(exported, compiler)
    if registry.get(exported.name.rstrip("0123456789")).probe().devices:
        pytest.skip("there is a device")
    done = run(program, 4, 0)
    assert done.returncode == 1 and not done.stdout
    assert ("error 10" in done.stderr and "was found" in done.stderr) or "not found" in done.stderr


def test_the_archive_of_a_device_needs_no_cxx(exported: Path) -> None:
    """One archive, from C alone, with the machine code in it."""
    text = (exported / "CMakeLists.txt").read_text()
    assert "CXX" not in text and "add_library(noah STATIC" in text and "noah_image.c" in text
    image = next(exported.glob("noah_loop.*")).read_bytes()
    words = [int(w, 16) for w in _hex((exported / "noah_image.c").read_text())]
    assert b"".join(w.to_bytes(8, "little") for w in words)[: len(image)] == image
    assert image[:4] == b"\x7fELF"


def _hex(text: str) -> list[str]:
    body = text[text.index("{") + 1 : text.rindex("}")]
    return [w.strip().rstrip("u") for w in body.split(",") if w.strip()]


@slow
def test_the_tokens_on_an_emulated_device_are_those_of_generate(tmp_path: Path) -> None:
    from ark_rocm_emulator.device import _library

    if not shutil.which("gcc"):
        pytest.skip("there is no gcc")
    _, stand_in = _library()
    noah, prompt, most = Checkpoint.open(NOAH), [0, 48, 79, 361, 1083], 3
    cpu = registry.get("cpu")
    with Generator(noah, cpu, cpu.open(0)) as generator:
        expected = list(generator.stream(prompt, most))
    machine = registry.machine("mi300x").with_processors(PROCESSORS)
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
    ("words", "said"),
    [
        (["--backend", "rocm", "--arch", "sm_90a"], "no machine model of 'rocm' is 'sm_90a'"),
        (["--backend", "cuda", "--machine", "a100", "--arch", "sm_90a"], "is sm_80, not sm_90a"),
        (["--backend", "mesh"], "has no way to run an exported model"),
    ],
)
def test_what_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    if words[1] not in registry.names():
        pytest.skip(f"{words[1]} is not installed")
    assert main(["export", str(NOAH), *words, "-o", str(tmp_path / "o")]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert any(part in text for part in said.split("|")), text
    assert not (tmp_path / "o").exists()
