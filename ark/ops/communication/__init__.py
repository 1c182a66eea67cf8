"""Ops between ranks, and what they become.

- `collectives`: all_reduce, all_gather and the others by any algorithm; `programs` makes tasks of
  the program that a call chose. `direct` puts every share straight to every peer, `switched` lets a
  switch add.
- `messages`: send and recv. `channels`: put, get, signal, wait, named in a model.
- `overlapped`, `overlapped_gather`: products and the collectives that they meet as one op; `bands`
  deals their rows.
"""
