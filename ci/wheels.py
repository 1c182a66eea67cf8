"""Collects the wheels that pip resolves from pyproject.toml, for a machine without a network.

`python ci/wheels.py --extra cuda --extra test --without torch --without transformers FOLDER`
resolves ark's dependencies and those of the named extras, for another machine's Python and
platform, and downloads the wheels to FOLDER. On the other machine, `python3 -m pip install
--no-index --find-links FOLDER ...` installs them. Packages that --without names must be installed
there already.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
# pip matches a platform literally: a wheel for an older C library needs its own tag.
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_24", "manylinux2014", "linux")


def requirements(extras: list[str], without: list[str]) -> list[str]:
    """Requirements of the project and of its extras; requirements on the project itself are
    expanded.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = project["optional-dependencies"]
    unknown = [e for e in extras if e not in table]
    if unknown:
        raise ValueError(
            f"the extra {unknown[0]!r} does not exist; expected one of {', '.join(sorted(table))}"
        )
    listed: list[str] = []
    queue = [*project["dependencies"], *(r for e in extras for r in table[e])]
    for word in queue:
        name = re.split(r"[\[<>=!~; ]", word, maxsplit=1)[0]
        if name == project["name"]:
            inner = re.search(r"\[([^\]]*)\]", word)
            for extra in inner.group(1).split(",") if inner else ():
                queue.extend(table[extra.strip()])
        elif name not in without and word not in listed:
            listed.append(word)
    return listed


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--extra", action="append", default=[], help="an extra of pyproject.toml")
    parser.add_argument("--without", action="append", default=[], help="a package to leave out")
    parser.add_argument("--python", default="3.12", help="the other machine's Python")
    parser.add_argument("--list", action="store_true", help="print the requirements and stop")
    chosen = parser.parse_args(argv)
    try:
        wanted = requirements(chosen.extra, chosen.without)
    except ValueError as error:
        parser.error(str(error))
    if chosen.list:
        print("\n".join(wanted))
        return 0
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    words = ["--only-binary=:all:", "--python-version", chosen.python, *platforms]
    command = [sys.executable, "-m", "pip", "download", "-q", "-d", str(chosen.folder)]
    return subprocess.run([*command, *words, *wanted], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
