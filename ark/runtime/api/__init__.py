"""The parts of ARK's interface under ARK's names, for users: `import ark` and the aliases offer all
of them.
"""
