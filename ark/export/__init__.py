"""Export ahead of time: a verified plan becomes a C library and a program that run without Python.

`write` writes a folder: the loop kernel as source and compiled, the plan's tables as data
(`description`), the parameters (`weights`), and the C files of `c/` that use them. Called by the
command line; documented in docs/export.md.
"""
