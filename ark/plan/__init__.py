"""The plan: its types, task kinds, memory layout, schedule, cost model and verifier."""
