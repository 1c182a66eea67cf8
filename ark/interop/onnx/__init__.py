"""ONNX files as ark models; docs/onnx.md lists the supported operators.

`load` reads and checks a file, `convert` builds a graph from its nodes, `model` runs the graph. The
operators are a table (`values`), which elementwise, movement, reductions, products, norms and the
other operator modules fill.
"""
