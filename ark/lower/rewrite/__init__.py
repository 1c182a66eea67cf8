"""Rewrites from graph to graph: one module for each pass, named after it. ark.lower.passes lists
them in order.

`views`, `strided`, `masks` and `copies` contain functions that several passes use. A pass returns a
graph with the same meaning as the given one, and does not change the given one.
"""
