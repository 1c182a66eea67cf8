"""ONNX files as ark models; docs/onnx.md lists the supported operators.

`load` reads and checks a file, `convert` builds a graph from its nodes, and `model` runs the graph.
The operators are in a table (in `values`), to which the modules of operators (elementwise,
movement, reductions, products, norms and others) add their entries.
"""
