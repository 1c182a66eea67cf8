"""Ops with which ranks communicate.

- `collectives`: all_reduce, all_gather and the others, by any algorithm.
- `messages`: send and recv.
- `channels`: put, get, signal, wait and others on channels between two ranks.

Their lowerings are in ark.lower.ops.communication.
"""
