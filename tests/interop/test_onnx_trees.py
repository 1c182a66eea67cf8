"""Ensembles of decision trees in ONNX files, compared with onnx's reference evaluator and its
tests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import ark
from ark.errors import ModelError
from ark.interop.onnx.model import from_proto
from tests.interop.node_suite import run_case, selected
from tests.slow import slow

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT")


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@slow
def test_case_of_the_node_suite() -> None:
    """onnx's own test of a tree ensemble, in float64, which the host computes."""
    (case,) = selected(("test_ai_onnx_ml_tree_ensemble_single_tree",))
    run_case(case)


def regressor(modes: tuple[str, ...], **words: Any) -> onnx.ModelProto:
    """Returns three trees of three levels over four features, with two targets, and a tree of one
    leaf.
    """
    rng = np.random.default_rng(1)
    rows: dict[str, list[Any]] = {k: [] for k in ("tree", "node", "feature", "mode", "value")}
    rows |= {k: [] for k in ("true", "false", "tracks", "t_tree", "t_node", "t_id", "t_weight")}
    for tree, inner in enumerate((7, 7, 7, 0)):
        for node in range(2 * inner + 1):
            leaf = node >= inner
            rows["tree"].append(tree)
            rows["node"].append(node)
            rows["feature"].append(0 if leaf else int(rng.integers(4)))
            rows["mode"].append("LEAF" if leaf else modes[int(rng.integers(len(modes)))])
            rows["value"].append(0.0 if leaf else float(rng.integers(-2, 3)) / 2)
            rows["true"].append(0 if leaf else 2 * node + 1)
            rows["false"].append(0 if leaf else 2 * node + 2)
            rows["tracks"].append(0 if leaf else int(rng.integers(2)))
            if leaf:
                for target in range(2):
                    rows["t_tree"].append(tree)
                    rows["t_node"].append(node)
                    rows["t_id"].append(target)
                    rows["t_weight"].append(float(rng.standard_normal()))
    node = helper.make_node(
        "TreeEnsembleRegressor",
        ["x"],
        ["y"],
        domain="ai.onnx.ml",
        n_targets=2,
        nodes_treeids=rows["tree"],
        nodes_nodeids=rows["node"],
        nodes_featureids=rows["feature"],
        nodes_modes=rows["mode"],
        nodes_values=rows["value"],
        nodes_truenodeids=rows["true"],
        nodes_falsenodeids=rows["false"],
        nodes_missing_value_tracks_true=rows["tracks"],
        target_treeids=rows["t_tree"],
        target_nodeids=rows["t_node"],
        target_ids=rows["t_id"],
        target_weights=rows["t_weight"],
        **words,
    )
    graph = helper.make_graph(
        [node],
        "trees",
        [helper.make_tensor_value_info("x", 1, ("rows", 4))],
        [helper.make_tensor_value_info("y", 1, ("rows", 2))],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize(
    ("modes", "words"),
    [
        (MODES[:1], {}),
        (MODES, {"aggregate_function": "AVERAGE"}),
        (MODES[:2], {"base_values": [0.5, -1.0]}),
    ],
    ids=["sums", "means", "base"],
)
def test_regressors_equal_the_reference(modes: tuple[str, ...], words: Any) -> None:
    """Tree regressors equal the reference, also for rows that contain exactly the threshold of a
    split, for which < and <= differ, and for NaN.
    """
    proto = regressor(modes, **words)
    model = from_proto(proto)
    rng = np.random.default_rng(2)
    for rows in (5, 9):
        x = (rng.integers(-4, 5, (rows, 4)) / 2).astype(np.float32)
        x[1, 2] = np.nan
        (want,) = ReferenceEvaluator(proto).run(None, {"x": x})
        np.testing.assert_allclose(model(x)[0], want, rtol=1e-5, atol=1e-6)
    model.close()


def test_nodes_that_lead_back_are_refused() -> None:
    proto = regressor(MODES[:1])
    (ends,) = (a for a in proto.graph.node[0].attribute if a.name == "nodes_truenodeids")
    ends.ints[1] = 0
    with pytest.raises(ModelError, match="form a cycle"):
        from_proto(proto)(np.zeros((2, 4), np.float32))
