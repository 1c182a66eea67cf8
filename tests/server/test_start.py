"""Which modules a start of `ark serve` may import: imports take most of its time
(bench/start_to_token.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.server.running import NOAH

HEAVY = {"torch", "transformers", "onnx", "scipy", "pandas", "sklearn", "matplotlib", "cuda"}


def test_server_starts_without_heavy_packages(tmp_path: Path) -> None:
    words = ["-X", "importtime", "-m", "ark", "serve", str(NOAH), "--port", "0"]
    words += ["--backend", "cpu", "--context", "64", "--slots", "1"]
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=subprocess.PIPE, stderr=file, text=True
        )
        try:
            assert process.stdout is not None
            assert "is served at" in process.stdout.readline()
        finally:
            process.kill()
            process.communicate()
    modules = re.findall(r"^import time:.*\| +([\w.]+)$", errors.read_text(), re.M)
    assert "ark.serving.engine" in modules and "uvicorn" in modules
    assert not {module.partition(".")[0] for module in modules} & HEAVY
