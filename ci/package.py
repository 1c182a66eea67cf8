"""Tests a built wheel or sdist outside of the repository. Called by the nox session `package`.

`python ci/package.py FILE EMULATOR` installs FILE with the extra `cpu` into a new environment,
changes to an empty folder, and there runs a new user's first steps: the command line, the first
program of docs/start.md and text from examples/noah, which is copied there. Then it installs the
wheel of the ROCm emulator and builds the emulator's core. On a failure it prints the reason and
exits with code 1.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ark", "ark_cpu", "ark_cuda", "ark_mesh", "ark_rocm")
INSPECT = f"""
import importlib.metadata, importlib.util, pathlib, sys
for name in {PACKAGES}:
    folder = pathlib.Path(importlib.util.find_spec(name).origin).parent
    assert pathlib.Path(sys.prefix) in folder.parents, f"{{name}} is from {{folder}}"
    assert (folder / "py.typed").is_file(), f"{{name}} has no py.typed"
about = importlib.metadata.distribution("ark-gpu").read_text("METADATA")
assert importlib.util.find_spec("ark_rocm_emulator") is None, "the emulator is a part of ark-gpu"
assert "](docs/" not in about, "the README has links to files that the index lacks"
assert {{e.name for e in importlib.metadata.entry_points(group="ark.backends")}} >= {{"cpu"}}
"""
EMULATOR = """
from ark_rocm_emulator.engine import core
core()
"""


def main(argv: list[str]) -> int:
    path, emulator = (Path(word).resolve() for word in argv)
    with tempfile.TemporaryDirectory(prefix="ark-package-") as place:
        folder = Path(place)
        venv.create(folder / "venv", with_pip=True)
        programs = folder / "venv/bin"
        shutil.copytree(ROOT / "examples/noah", folder / "work/noah")
        page = (ROOT / "docs/start.md").read_text(encoding="utf-8")
        blocks = re.findall(r"```python\n(.*?)```", page, re.S)
        (first,) = (block for block in blocks if "ark.Runtime()" in block)
        text = ("generate", "noah", "--prompt", "The king said", "--max-new-tokens", "8")
        for command in (
            (programs / "pip", "install", "--quiet", f"{path}[cpu]"),
            (programs / "python", "-I", "-c", INSPECT),
            (programs / "python", "-I", "-c", first),
            (programs / "ark", "info"),
            (programs / "ark", *text, "--backend", "cpu"),
            (programs / "pip", "install", "--quiet", emulator),
            (programs / "python", "-I", "-c", EMULATOR),
        ):
            done = subprocess.run([str(word) for word in command], cwd=folder / "work", check=False)
            if done.returncode:
                print(f"{path.name}: {' '.join(map(str, command))[:200]} failed", file=sys.stderr)
                return 1
    print(f"{path.name}: installed and tested outside of the repository")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
