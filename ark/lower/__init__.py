"""From a graph to a plan. The modules in the order in which a graph passes them:

- `prepare` rewrites the graph. One step a module: `transposes` and `pack`; `choose` picks each
  phase's kernel variant; then, kernel by kernel, `fuse`, `slices`, `regions`, `chains`, `narrow`,
  `rounded`, `epilogues`, `gathers`, `windows`, `overlap`, `normed`, `spread`; `waves` at last.
- `nodes` lowers what is left, op by op, through `registry`, which ark.ops fills. The lowerings
  write into a `context` and share `tiling`, `cuts`, `parts`, `engines`, `merge`, `views`, `unpack`.
- `pipeline` makes the plan: `packets`, `contents`, and the schedule of ark.plan. `ranks` does it
  for all ranks.
"""
