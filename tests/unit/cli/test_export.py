"""`ark export`: models as C libraries. The tokens equal those of `ark generate`, computed without
Python and under sanitizers. Weights of another model are refused. Also the functions' error codes
and the export of a plan of a user's graph.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ark.backend import registry
from ark.cli import main
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from tests.cases.export import ADDRESSES, Library, compile_c
from tests.slow import slow

NOAH = Path(__file__).resolve().parents[3] / "examples/noah"
# The error codes of c/ark.h.
BAD_ARGUMENT, BAD_FILE, NO_TENSOR, BAD_SIZE, NOT_LOADED, NOT_BOUND = 1, 3, 4, 5, 6, 7


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    assert main(["export", str(NOAH), "--backend", "cpu", "-o", str(folder), "--name", "noah"]) == 0
    return folder


@pytest.fixture(scope="module")
def program(exported: Path) -> Path:
    return compile_c(exported, "noah", "generate", *ADDRESSES, "generate.c")


def run(program: Path, weights: Path, *numbers: int) -> subprocess.CompletedProcess[str]:
    words = [str(program), str(weights), *map(str, numbers)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert "Sanitizer" not in done.stderr and "runtime error" not in done.stderr, done.stderr
    return done


def test_program_makes_the_tokens_of_generate(exported: Path, program: Path) -> None:
    """The exported program generates the tokens of Generator.stream for prompts of one token, of
    less than a chunk, of more than a chunk, and for one that reaches the end of the context.
    """
    prompts = [[0], [0, 48, 79, 361, 1083, 260, 754], [0, *range(100, 137)], [5] * 500]
    backend = registry.get("cpu")
    device = backend.open(0)
    with Generator(Checkpoint.open(NOAH), backend, device) as generator:
        for prompt in prompts:
            expected = list(generator.stream(prompt, 24))
            done = run(program, exported / "noah.safetensors", 24, *prompt)
            assert done.returncode == 0, done.stderr
            assert [int(word) for word in done.stdout.split()] == expected
    device.close()


def test_program_stops_at_a_stop_token(exported: Path, tmp_path: Path) -> None:
    """The exported source contains the checkpoint's stop token. If it is replaced by the third
    token that the model generates, the text ends there.
    """
    folder = tmp_path / "ends"
    shutil.copytree(exported, folder)
    source = (folder / "noah.c").read_text()
    assert "stops[] = {1, -1, " in source  # from config.json
    (folder / "noah.c").write_text(source.replace("stops[] = {1, ", "stops[] = {298, "))
    program = compile_c(folder, "noah", "ends", *ADDRESSES, "generate.c")
    prompt = (0, 48, 79, 361, 1083, 260, 754)
    done = run(program, folder / "noah.safetensors", 24, *prompt)
    assert (done.returncode, done.stdout) == (0, "13 538 298\n"), done.stderr


def test_prompts_that_cannot_be_served_are_refused(exported: Path, program: Path) -> None:
    for numbers, message in (((4, 2048), "the token 2048"), ((4, *[1] * 512), "at most 511")):
        done = run(program, exported / "noah.safetensors", *numbers)
        assert done.returncode == 1 and message in done.stderr
    assert run(program, exported / "noah.safetensors", 0, 1).returncode == 2


Header = dict[str, dict[str, object]]


def _swap_type(h: Header) -> None:
    h["norm"]["dtype"] = "F32"


def _reshape(h: Header) -> None:
    h["norm"]["shape"] = [1, 256]


def _rename(h: Header) -> None:
    h["stranger"] = h.pop("norm")


def _drop(h: Header) -> None:
    del h["norm"]


def _overlap(h: Header) -> None:
    h["norm"]["data_offsets"] = h["layers.0.attention_norm"]["data_offsets"]


def _beyond(h: Header) -> None:
    h["norm"]["data_offsets"] = [1 << 63, (1 << 63) + 512]


def _negative(h: Header) -> None:
    h["norm"]["data_offsets"] = [-512, 0]


def _extra(h: Header) -> None:
    h["norm"]["stride"] = 1


def _nested(h: Header) -> None:
    h["__metadata__"] = {"a": {"b": "c"}}


CHANGES: dict[str, tuple[Callable[[Header], None], str]] = {
    "type": (_swap_type, "another type"),
    "shape": (_reshape, "another shape"),
    "unknown": (_rename, "the model has not"),
    "missing": (_drop, "is missing"),
    "overlap": (_overlap, "overlap or leave a hole"),
    "beyond": (_beyond, "overlap or leave a hole"),
    "negative": (_negative, "offsets"),
    "field": (_extra, "unknown field"),
    "metadata": (_nested, "metadata"),
}


def parts(path: Path) -> tuple[bytes, bytes]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def whole(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def refused(program: Path, path: Path, content: bytes) -> str:
    path.write_bytes(content)
    done = run(program, path, 1, 0)
    assert done.returncode == 1 and done.stdout == ""
    return done.stderr


@pytest.mark.parametrize("change", CHANGES)
def test_weights_of_another_header_are_refused(
    exported: Path, program: Path, tmp_path: Path, change: str
) -> None:
    header, data = parts(exported / "noah.safetensors")
    entries = json.loads(header)
    apply, message = CHANGES[change]
    apply(entries)
    assert message in refused(program, tmp_path / "bad", whole(json.dumps(entries).encode(), data))


def test_damaged_weights_are_refused(exported: Path, program: Path, tmp_path: Path) -> None:
    header, data = parts(exported / "noah.safetensors")
    name = next(iter(json.loads(header)))
    repeated = header.rstrip()[:-1] + b"," + header.strip()[1:]
    for content, message in (
        (b"", "shorter than 8"),
        (b"\xff" * 64, "longer than the file"),
        (whole(b"", data), "no JSON object"),
        (whole(header, data[:-1]), "more or fewer bytes"),
        (whole(header, data + b"\0"), "more or fewer bytes"),
        (whole(header + b"x", data), "goes on behind"),
        (whole(repeated, data), "is there twice"),
        (whole(header.replace(name.encode(), b"\\u0061", 1), data), "cannot be read"),
        (whole(b'{"a":' * 100_000, data), "the model has not"),
        (whole(header[: len(header) // 2], data), "not this model's"),
    ):
        assert message in refused(program, tmp_path / "bad", content)
    assert "cannot be opened" in run(program, tmp_path / "none", 1, 0).stderr


def test_header_with_any_byte_changed_is_read_or_refused(
    exported: Path, program: Path, tmp_path: Path
) -> None:
    header, data = parts(exported / "noah.safetensors")
    rng = random.Random(7)
    for _ in range(25):
        changed = bytearray(header)
        changed[rng.randrange(len(header.rstrip()))] = rng.choice(b'{}[],:"\\09a\0\xff')
        (tmp_path / "bad").write_bytes(whole(bytes(changed), data))
        assert run(program, tmp_path / "bad", 1, 0).returncode in (0, 1)


def test_wrong_calls_get_codes_and_texts(exported: Path) -> None:
    library = Library(compile_c(exported, "noah", "noah.so", "-fPIC", "-shared"), "noah")
    assert library.execute([1, 1]) == NOT_LOADED
    assert b"ark_load first" in library.c.ark_error(library.instance)
    assert library.execute([1]) == BAD_ARGUMENT
    assert library("ark_load", b"/nowhere/weights") == BAD_FILE
    assert library.array("ark_write", "nothing", np.zeros(1)) == NO_TENSOR
    assert library.array("ark_write", "norm", np.zeros(255, np.int16)) == BAD_SIZE
    assert library.array("ark_read", "position", np.zeros(2, np.int32)) == BAD_SIZE
    assert library.array("ark_bind", "norm", np.zeros(256, np.int16)) == BAD_ARGUMENT
    assert b"norm has memory of its own" in library.c.ark_error(library.instance)
    for function, words in (("ark_read", b"3 were asked for"), ("ark_write", b"3 were given")):
        assert library.array(function, "norm", np.zeros(3, np.int8)) == BAD_SIZE
        assert words in library.c.ark_error(library.instance)
    size = ctypes.c_size_t()
    assert library("ark_size", b"nothing", ctypes.byref(size)) == NO_TENSOR
    assert b'no tensor "nothing"' in library.c.ark_error(library.instance)
    assert library("ark_size", b"norm", None) == BAD_ARGUMENT
    assert b"a pointer is null" in library.c.ark_error(library.instance)
    assert library("ark_size", b"norm", ctypes.byref(size)) == 0 < size.value
    assert library.c.ark_error(library.instance) == b""  # a successful call clears an earlier error
    texts = {library.c.ark_status_text(status) for status in range(12)}
    assert len(texts) == 12
    library("ark_destroy")


def test_plan_of_external_tensors_equals_numpy(tmp_path: Path) -> None:
    script, plan = tmp_path / "model.py", tmp_path / "linear.json"
    script.write_text(
        "import ark\n"
        "x = ark.placeholder([4, 32], ark.fp32, name='x')\n"
        "w = ark.parameter([16, 32], ark.fp32, name='w')\n"
        "y = ark.relu(ark.linear(x, w), name='y')\n"
    )
    assert main(["plan", str(script), "--machine", "cpu-2", "-o", str(plan)]) == 0
    assert main(["export", str(plan), "--backend", "cpu", "-o", str(tmp_path)]) == 0
    library = Library(compile_c(tmp_path, "linear", "made.so", "-fPIC", "-shared"), "linear")
    rng = np.random.default_rng(3)
    w, y = rng.normal(size=(16, 32)).astype(np.float32), np.zeros((4, 16), np.float32)
    assert library.execute([1]) == NOT_BOUND
    for _ in range(2):  # the second time with other arrays
        x = rng.normal(size=(4, 32)).astype(np.float32)
        bound = [library.array("ark_bind", n, a) for n, a in (("x", x), ("w", w), ("y", y))]
        assert bound == [0, 0, 0]
        assert library.execute([1]) == 0
        np.testing.assert_allclose(y, np.maximum(x @ w.T, 0), rtol=1e-5, atol=1e-5)
    library("ark_destroy")


@pytest.mark.parametrize(
    ("words", "errors"),
    [
        (["--name", "1x"], "must begin with a-z"),
        (["--name", "layout"], "not be one of ark"),
        (["--arch", "a b;c"], "-march"),
        (["--machine", "h100"], "made for"),
    ],
)
def test_exports_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], errors: str
) -> None:
    assert main(["export", str(NOAH), "--backend", "cpu", "-o", str(tmp_path / "o"), *words]) == 2
    assert errors in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "o").exists()


PAGES_MAIN = """#include "noah.h"
#include <stdio.h>

int main(void) {
  const int32_t prompt[7] = {1, 2, 3, 4, 5, 6, 7};
  int32_t tokens[40];
  size_t made = 0;
BLOCK  return status != ARK_OK || made != 40;
}
"""


def test_calls_of_the_page(exported: Path) -> None:
    page = (NOAH.parents[1] / "docs/export.md").read_text()
    (block,) = re.findall(r"```c\n(.*?)```", page, re.S)
    (exported / "calls.c").write_text(PAGES_MAIN.replace("BLOCK", block))
    compiled = compile_c(exported, "noah", "calls", "calls.c")
    done = subprocess.run([str(compiled)], cwd=exported, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not there")
def test_pages_commands(exported: Path, tmp_path: Path) -> None:
    """The three commands of docs/export.md produce the tokens of the folder used above."""
    text = (NOAH.parents[1] / "docs/export.md").read_text()
    export, build, run_it = re.findall(r"^    (\S.*)$", text, re.M)
    assert (
        main([*shlex.split(export.replace("examples/noah", str(NOAH)))[1:-1], str(tmp_path)]) == 0
    )
    for line in build.split(" && "):
        words = [word.replace("out", str(tmp_path), 1) for word in shlex.split(line)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    words = [word.replace("out/", f"{tmp_path}/", 1) for word in shlex.split(run_it)]
    done = run(Path(words[0]), Path(words[1]), *map(int, words[2:]))
    compiled = compile_c(exported, "noah", "page", "generate.c")
    expected = run(compiled, exported / "noah.safetensors", *map(int, words[2:]))
    assert done.returncode == 0 and len(done.stdout.split()) == 40
    assert done.stdout == expected.stdout
