"""Runs programs with modules of ark that are edited as a page of docs/ describes. The files of the
tree are not changed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FINDER = """
import importlib.machinery, importlib.util, pathlib, sys

class Edited(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        return compile(pathlib.Path(EDITED[name][0]).read_text(), self.path, "exec")

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in EDITED:
            return None
        _, file, folders = EDITED[name]
        loader = Edited(name, file)
        return importlib.util.spec_from_file_location(
            name, file, loader=loader, submodule_search_locations=folders
        )

sys.meta_path.insert(0, Finder)
"""


def run(folder: Path, modules: Mapping[str, str], program: str) -> str:
    """Runs a program for which these modules have the given texts and returns its output. The files
    are written to the folder.
    """
    paths = {}
    for name, text in modules.items():
        file, folders = _place(name)
        path = folder / name / file.name
        path.parent.mkdir()
        path.write_text(text)
        paths[name] = (str(path), str(file), folders)
        if not file.is_file():  # a package that looks for its modules finds the new one too
            package = name.rpartition(".")[0]
            beside, known = _place(package)
            paths.setdefault(package, (str(beside), str(beside), known))[2].append(str(path.parent))
    command = [sys.executable, "-c", f"EDITED = {paths!r}\n{FINDER}\n{program}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _place(name: str) -> tuple[Path, list[str] | None]:
    """A module's file in the tree and, if it is a package, the folders of its modules."""
    package = ROOT / name.replace(".", "/")
    if package.is_dir():
        return package / "__init__.py", [str(package)]
    return package.with_suffix(".py"), None


def before(file: str, anchor: str, text: str) -> str:
    """The text of a file of the tree with an insertion before the only occurrence of the anchor."""
    given = (ROOT / file).read_text()
    assert given.count(anchor) == 1, f"{file} has {given.count(anchor)} times {anchor!r}"
    return given.replace(anchor, text + anchor)
