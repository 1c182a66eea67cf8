"""Ahead of time: a verified plan becomes a C library and a program that need no Python.

`write` puts a folder together: the loop kernel as source and compiled, the plan's tables as data
(`description`), the parameters (`weights`), and the C files of `c/` that walk them. Called by the
command line; docs/export.md is the page.
"""
