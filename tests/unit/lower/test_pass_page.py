"""docs/new-pass.md followed literally: its pass rewrites a graph without changing the results."""

from __future__ import annotations

from pathlib import Path

from tests import edited, pages

PAGE = "new-pass.md"
PROGRAM = """
import numpy as np
import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.text import to_text
from ark.lower.observe import observed
from ark.lower.passes import PASSES
from ark.lower.prepare import prepare
from ark.lower.rewrite.skip_relus import skip_relus

assert "skip_relus" in [step.name for step in PASSES]
model = Model()
with use_model(model):
    x = ark.tensor([4, 8], ark.fp32)
    third = ark.relu(ark.relu(ark.relu(x)))
    first = ark.relu(x)
    ark.copy(ark.zeros([4, 8]), x)  # what the next one reads is no longer there
    ark.relu(first)
steps = {}

def keep(name, before, after, context):
    if name == "skip_relus":
        again = skip_relus(after, context)
        assert to_text(again) == to_text(after)
        steps.update(before=before, after=after)

with observed(keep):
    prepare(model.graph, registry.machine("h200"), {"external": [third.ir.buffer.id]})
reads = {
    key: [n.inputs[0].id for n in graph.nodes if n.type == "relu"] for key, graph in steps.items()
}
assert len(set(reads["before"])) == 4  # x, two results of relus, and `first`
assert reads["after"] == [reads["before"][0]] * 4 + [reads["before"][4]], reads

ark.init(backend="cpu")
array = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
x = ark.tensor([4, 8], ark.fp32)
y = ark.relu(ark.relu(x))
with ark.Runtime() as runtime:
    runtime.launch()
    x.from_numpy(array)
    runtime.run()
    np.testing.assert_array_equal(y.to_numpy(), np.maximum(array, 0))
print("followed")
"""


def test_pass_of_the_page_rewrites_graphs(tmp_path: Path) -> None:
    module, line, shown = pages.python_blocks(PAGE)
    begin, entry = shown.split("    ...\n")
    name, _, text = module.partition("\n")
    file = "ark/lower/passes.py"
    assert begin in (edited.ROOT / file).read_text()
    listed = edited.before(file, "    Pass(\n        fuse_rotary,\n", entry)
    anchor = "from ark.lower.rewrite.split_elementwise"
    listed = listed.replace(anchor, line + anchor)
    modules = {"ark.lower.rewrite.skip_relus": text, "ark.lower.passes": listed}
    assert edited.run(tmp_path, modules, PROGRAM) == "followed\n"
    first = (pages.DOCS / PAGE).read_text().split("\n\n")[1].replace("\n", " ")
    assert f"2 files: `{name.removeprefix('# ')}`, `{file}`." in first
