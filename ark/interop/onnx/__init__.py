"""ONNX files as ark models; docs/onnx.md lists the supported operators.

load reads and checks a file, convert walks its nodes, model runs what comes out. The operators are
a table (values) that the modules elementwise, movement, reductions, products and norms fill.
"""
