"""docs/new-quantised-format.md followed literally: its format gives torch's values."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import edited, pages

PAGE = "new-quantised-format.md"
PROGRAM = """
from pathlib import Path
import torch
from ark.models.checkpoint import Checkpoint
from tests.cases.quantized import check_values, quantised_checkpoint

def quantise(weight):
    scale = weight.abs().amax(1, keepdim=True) / 448.0
    codes = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale

config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
_, there, values = quantised_checkpoint(Path(FOLDER), quantise, config)
checkpoint = Checkpoint.open(there)
assert len(checkpoint.config.layouts) == len(values) > 0
check_values(checkpoint, values)
print("followed")
"""


def test_format_of_the_page_is_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    module, entry = pages.python_blocks(PAGE)
    name, _, text = module.partition("\n")
    file = "ark/models/formats/__init__.py"
    listed = edited.before(file, '    "fp8": fp8.read,\n', entry)
    modules = {
        "ark.models.formats.fbgemm": text,
        "ark.models.formats": listed.replace(" fp8, gptq, mxfp4\n", " fbgemm, fp8, gptq, mxfp4\n"),
    }
    program = f"FOLDER = {str(tmp_path)!r}\n{PROGRAM}"
    assert edited.run(tmp_path, modules, program) == "followed\n"
    first = (pages.DOCS / PAGE).read_text().split("\n\n")[1].replace("\n", " ")
    assert f"2 files: `{name.removeprefix('# ')}`, `{file}`." in first
