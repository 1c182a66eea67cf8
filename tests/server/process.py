"""`ark serve` as a process of its own, and its memory, files and sockets as the system reports
them.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

PATIENCE_S = 120.0


class Process:
    """A running `ark serve` on the CPU. As a context manager it kills the process at the end.

    name: a checkpoint's directory or its name on a hub. before: statements that the process
    executes first. environment: additional variables.
    """

    def __init__(self, name: Path | str, *words: str, before: str = "", **environment: str) -> None:
        main = "import sys; from ark.cli import main; sys.exit(main(sys.argv[1:]))"
        start = ["-c", f"{before}\n{main}"] if before else ["-m", "ark"]
        self.process = subprocess.Popen(
            [sys.executable, *start, "serve", str(name), "--backend", "cpu", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        address = re.search(r"http://\S+", line)
        assert address, (line, self.process.communicate()[1])
        self.url = address.group()
        self.port = int(self.url.rsplit(":", 1)[1])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def resident_bytes(self) -> int:
        """Returns the process's resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def open_files(self) -> int:
        """Returns the number of the process's open files and sockets."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def listening(self) -> list[str]:
        """Returns the local addresses on which the process listens, from /proc/net."""
        pid, inodes = self.process.pid, set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                inodes |= {match.group(1)} if match else set()
        rows = [
            line.split()
            for name in ("tcp", "tcp6", "udp", "udp6")
            for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        ]
        return [row[1] for row in rows if row[9] in inodes and row[3] in ("0A", "07")]

    def listens_where_asked(self) -> bool:
        """True if the process listens only on 127.0.0.1, at the requested port."""
        return self.listening() == [f"0100007F:{self.port:04X}"]
