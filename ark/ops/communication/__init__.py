"""Ops for communication between ranks.

- `collectives`: all_reduce, all_gather and other collectives, by any algorithm.
- `messages`: send and recv.
- `channels`: put, get, signal, wait and other operations on channels between two ranks.

Their lowerings are in ark.lower.ops.communication.
"""
