"""`ark export` of mutated plans, checkpoints and ONNX files. The command must refuse the file in
one paragraph, or write C files that a compiler accepts. No name from the file may become code.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.fuzz import WrongResultError, checkpoints, mutate_onnx, plans
from tests.fuzz.commands import command

Keep = Callable[[str], None]
STEMS = ("model", "a b", "1;x", "ark", "\u00b2", "x" * 100, "int", '"', "-o")


def _plan(rng: random.Random, keep: Keep, folder: str) -> str:
    text = plans.mutated(rng)
    keep(text)
    path = Path(folder, f"{rng.choice(STEMS)}.json")
    path.write_text(text, errors="surrogatepass")
    return str(path)


def _checkpoint(rng: random.Random, keep: Keep, folder: str) -> str:
    path = Path(folder, rng.choice(STEMS))
    path.mkdir()
    checkpoints.mutated(rng, keep, str(path))
    return str(path)


def _network(rng: random.Random, keep: Keep, folder: str) -> str:
    data = mutate_onnx.of_model(rng)
    keep(repr(data))
    path = Path(folder, f"{rng.choice(STEMS)}.onnx")
    path.write_bytes(data)
    return str(path)


SOURCES = (_plan, _plan, _checkpoint, _network)


def export(rng: random.Random, keep: Keep) -> bool:
    """The target: exports a mutated file for the CPU."""
    with tempfile.TemporaryDirectory(prefix="ark-fuzz-") as folder:
        source = rng.choice(SOURCES)(rng, keep, folder)
        folder_out = Path(folder, "made")
        words = ["export", source, "--backend", "cpu", "-o", str(folder_out)]
        code, output = command(words + rng.choice(([], ["--name", "model"])))
        if code == 0:
            _check(folder_out)
            return True
        if folder_out.exists():
            raise WrongResultError(
                f"exit code {code}, and files are left: {sorted(folder_out.iterdir())}"
            )
    if code not in (1, 2) or "ark: " not in output or "\n\n" in output or len(output) > 3000:
        raise WrongResultError(f"exit code {code}: {output[-2000:]}")
    return False


def _check(folder: Path) -> None:
    """Raises WrongResultError unless the folder is complete and the C compiler, if there is one,
    accepts its C files.
    """
    sources = sorted(p.name for p in folder.glob("*.c"))
    if not sources or not list(folder.glob("lib*_loop.*")):
        raise WrongResultError(f"exit code 0, and the folder has {sorted(folder.iterdir())}")
    compiler = shutil.which("gcc")
    if compiler is None:
        return
    words = [compiler, "-std=c11", "-Wall", "-Werror", "-fsyntax-only", *sources]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise WrongResultError(f"the exported C is refused: {done.stderr[:2000]}")
