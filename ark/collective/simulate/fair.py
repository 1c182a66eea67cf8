"""Computes max-min fair rates of flows over shared links, by progressive filling.

The rates of all flows grow equally until a link is full. The flows on that link keep their rate,
and the other rates continue to grow (Bertsekas and Gallager, "Data Networks", section 6.5.2).
Called by the engine.
"""

from __future__ import annotations

import numpy as np


def fair_rates(
    flow_of: np.ndarray, link_of: np.ndarray, capacity: np.ndarray, flows: int
) -> np.ndarray:
    """Returns the rate of each flow, shape (flows,), in the unit of `capacity`.

    Args:
        flow_of, link_of: integer arrays of equal length. Entry i means that flow flow_of[i] crosses
            link link_of[i]. Every flow must occur.
        capacity: shape (links,), above zero.
        flows: the number of flows.
    """
    rate = np.zeros(flows)
    left = capacity.astype(float).copy()
    open_entry = np.ones(len(flow_of), dtype=bool)
    while open_entry.any():
        flow, link = flow_of[open_entry], link_of[open_entry]
        users = np.bincount(link, minlength=len(capacity))
        used = users > 0
        share = np.full(len(capacity), np.inf)
        share[used] = left[used] / users[used]
        level = max(share.min(), 0.0)
        full = share <= level * (1 + 1e-9)
        frozen = np.zeros(flows, dtype=bool)
        frozen[flow[full[link]]] = True
        rate[frozen] = level
        done = frozen[flow_of] & open_entry
        left -= level * np.bincount(link_of[done], minlength=len(capacity))
        open_entry &= ~done
    return rate
