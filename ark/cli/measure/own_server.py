"""Runs `ark serve` for a checkpoint while `ark bench serve DIR` measures it. Called by
ark.cli.bench_serve.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ark.errors import SystemError

END_S = 60.0


@contextmanager
def own_server(directory: str, options: Sequence[str]) -> Iterator[str]:
    """A context in which `ark serve DIR` runs on a free port. It yields the server's URL. Raises
    SystemError if the server does not start; the server prints the reason on standard error.
    """
    words = [sys.executable, "-m", "ark", "serve", directory, "--port", "0", *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r"http://\S+", process.stdout.readline())
            if address is None:
                raise SystemError(f"`ark serve {directory}` did not start; see its reason above")
            yield address.group()
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
