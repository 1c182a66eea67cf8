"""How ops become groups of tasks: lowerings that need a module of their own, by family of ops."""
