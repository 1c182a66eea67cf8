"""Lowering functions of ops: nodes become groups of tasks. Each module has the name of its family
in ark.ops.
"""
