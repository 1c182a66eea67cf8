"""The interface of ARK (microsoft/ark), which ark supports under the same names. `import ark` and
the module aliases offer all of it.
"""
