"""The plan, which lists the tasks of each processor: its types, task kinds, memory layout,
schedule, cost model and verifier. ark.lower creates plans, ark.backend.codegen and ark.runtime read
them.
"""
