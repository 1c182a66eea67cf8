"""Runs plans: compiles and loads kernels, launches them, communicates with running kernels and with
other ranks, and records traces. `api` has ARK's names for users.
"""
