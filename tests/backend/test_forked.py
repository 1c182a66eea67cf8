"""A process that is forked while a kernel runs: at its end the child does not wait for the kernel's
threads, which exist only in the parent.
"""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, sys
import numpy as np
import ark

ark.init(backend="cpu")
x = ark.tensor([8])
y = ark.exp(x)
runtime = ark.Runtime()
runtime.launch(loop_mode=sys.argv[1] == "loop")
x.from_numpy(np.zeros(8, np.float32))
runtime.run()

def child(part):
    if part == "run":
        try:
            runtime.run()
        except ark.InvalidUsageError as error:
            assert "before this process was forked" in str(error)
        else:
            assert sys.argv[1] != "loop"
    elif part == "again":
        runtime.launch()
        x.from_numpy(np.ones(8, np.float32))
        runtime.run()
        assert abs(y.to_numpy()[0] - np.e) < 1e-5
    elif part == "stop":
        runtime.stop()
    print(part, flush=True)  # and leaves as processes do, with the interpreter's end

for part in ("run", "again", "stop", "leave"):
    pid = os.fork()
    if pid == 0:
        child(part)
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0, part
    runtime.run()
    assert y.to_numpy()[0] == 1.0
runtime.stop()
"""


def test_forked_process_neither_hangs_nor_stops_the_other() -> None:
    for mode in ("loop", "each"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, mode],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["run", "again", "stop", "leave"]
        assert "kept" not in done.stderr
