"""The plan: types, task kinds, memory, schedule, cost and the proof that it is right."""
