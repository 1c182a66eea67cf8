"""How ops become groups of tasks: a module for each family of ops, of its name in ark.ops."""
