"""Collectives outside of a model, on NumPy arrays and torch tensors.

Groups of ranks, the functions of ark.comm (all_reduce and friends), and the torch.distributed
backend "ark".
"""
