"""Graph to graph: one module for each pass, named after it. ark.lower.passes lists them in order.

`views`, `strided`, `masks` and `copies` hold what several passes use. A pass returns a graph that
means the same as the one it was given, and leaves the given one as it was.
"""
