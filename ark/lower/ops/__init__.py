"""The lowering functions of ops. A lowering function converts a node of the graph to groups of tile
tasks; ark.lower.nodes calls it through ark.lower.registry. Each module has the name of the module
of ark.ops that defines the op for users.
"""
