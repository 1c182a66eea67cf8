"""Collectives on a network. A collective program lists the puts (one-sided writes to a peer's
memory) and reduces of all ranks. `programs` has the type of programs, their builder, checker,
executor and the formats of other libraries. `topology` reads, builds and detects networks.
`synthesis` makes a program for a network with an algorithm (`classics`, `forestcoll`, `taccl`),
`simulate` predicts its time and `page` draws it. This package does not depend on plans. Users call
it as ark.comm and through `ark topo`.
"""
