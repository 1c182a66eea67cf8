"""Lowering functions of ops, which convert nodes to groups of tasks. Each module has the name of
its family in ark.ops.
"""
