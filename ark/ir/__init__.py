"""The graph that front ends build and ark.lower turns into a plan: data types, tensors and
operators.
"""
