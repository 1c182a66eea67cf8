"""Graph to graph: each module is one step that finds a pattern of nodes and puts better ones there.

`ark.lower.prepare` calls them, in this order: `transposes`, `channels`, `pack` and `attend`, which
uses `masks`, `strided` and `copies`, for the whole graph; then, kernel by kernel, `fuse`, `slices`,
`regions`, `chains`, `narrow`, `rounded`, `rows`, `scales`, `epilogues`, `factors`, `terms`,
`gathers`, `windows`, `overlap`, `normed`, `spread`; `waves` at last, which puts nodes in another
order. `views` is what several of them use. What a step returns means the same as what it was given;
the planner's option `fuse=False` leaves out all but `transposes`, `pack` and `spread`.
"""
