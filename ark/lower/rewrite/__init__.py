"""The compiler's passes, each of which rewrites a graph: one module for each pass, named after it.
ark.lower.passes lists them in order, and ark.lower.prepare runs them.

`views`, `strided`, `masks` and `copies` contain functions that several passes use. A pass returns a
new graph that computes the same results, and does not change the given graph.
"""
