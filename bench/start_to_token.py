"""Measures the time of `ark serve` from its start to the first token of a request, part by part.

    python bench/start_to_token.py [DIRECTORY] [--starts 3]

The first start also fills the cache of plans and kernels. Prints wall-clock times, which are valid
only on an idle machine, and CPU times of the process and its children, which are valid on a busy
machine, too.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

NOAH = Path(__file__).resolve().parents[1] / "examples/noah"


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def start(directory: str, options: list[str]) -> str:
    """Starts a server, requests a token and ends the server. Returns the times."""
    begin = time.monotonic()
    words = [sys.executable, "-m", "ark", "serve", directory, "--port", "0", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        address = re.search(r"http://([\w.]+):(\d+)", process.stdout.readline())
        if address is None:
            raise SystemExit(f"{' '.join(words)} ended without serving")
        ready_s, ready_cpu_s = time.monotonic() - begin, cpu_s(process.pid)
        connection = http.client.HTTPConnection(address[1], int(address[2]), timeout=60)
        asked = {"prompt": "The king said", "max_tokens": 8, "stream": True}
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        line = answer.readline()
        if answer.status != 200:
            raise SystemExit(f"the server answers {answer.status}: {line.decode()}")
        token_s, token_cpu_s = time.monotonic() - begin, cpu_s(process.pid)
    finally:
        process.terminate()
        process.wait()
    return (
        f"ready after {ready_s:.2f} s ({ready_cpu_s:.2f} s of CPU), first token after "
        f"{token_s:.2f} s ({token_cpu_s:.2f} s of CPU)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", nargs="?", default=str(NOAH))
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    for number in range(args.starts):
        shown = start(args.directory, ["--backend", args.backend])
        print(f"{'first start' if number == 0 else 'warm start'}: {shown}", flush=True)


if __name__ == "__main__":
    main()
