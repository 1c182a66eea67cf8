"""From a graph to a plan. The modules, in the order in which a graph passes them:

- `prepare` runs the rewrites that `passes` lists, each a module of `rewrite`. `choose` chooses each
  phase's kernel variant.
- `nodes` lowers the remaining ops one by one, through `registry`, which ark.ops fills. The
  lowerings are in `ops`, write into a `context` and share `tiling`, `cuts`, `copies`, `engines`,
  `merge` and `unpack`.
- `pipeline` creates the plan, with `packets`, `contents` and the schedule of ark.plan. `ranks` does
  this for all ranks.
"""
