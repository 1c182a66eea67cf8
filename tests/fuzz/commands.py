"""ark's command line, run in this process in an empty folder."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile

from tests.fuzz import WrongResultError


def command(words: list[str]) -> tuple[int, str]:
    """Runs ark's command in an empty folder. Returns its exit code and its standard error. Raises
    WrongResultError for a traceback.
    """
    from ark.cli import main

    before = os.getcwd()
    folder = tempfile.mkdtemp(prefix="ark-fuzz-")
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as end:  # raised by argparse for wrong arguments and by --help
                code = int(end.code or 0)
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    if "Traceback" in err.getvalue():
        raise WrongResultError(err.getvalue()[-2000:])
    return code, err.getvalue()
