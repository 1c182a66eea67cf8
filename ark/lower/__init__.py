"""Turns a graph of ops into a plan of tile tasks. A graph passes through the modules in this order:

- `prepare` runs the rewrites that `passes` lists, each a module of `rewrite`. `choose` chooses each
  phase's kernel variant.
- `nodes` lowers the remaining ops one by one. It finds an op's lowering function in `registry`; the
  functions are in `ops`. They add tasks to a `context` and share the helpers in `tiling`, `cuts`,
  `copies`, `engines`, `merge` and `unpack`.
- `pipeline` creates the plan, with `packets`, `contents` and the schedule of ark.plan. `ranks`
  creates the plans of all ranks.
"""
