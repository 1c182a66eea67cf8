"""ark's command line, run in this process in an empty folder."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile

from tests.fuzz import WrongResult


def command(words: list[str]) -> tuple[int, str]:
    """The exit code of ark's command in an empty folder, and what it says on standard error."""
    from ark.cli import main

    before = os.getcwd()
    folder = tempfile.mkdtemp(prefix="ark-fuzz-")
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as end:  # argparse, or --help
                code = int(end.code or 0)
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    if "Traceback" in err.getvalue():
        raise WrongResult(err.getvalue()[-2000:])
    return code, err.getvalue()
