"""Collectives on a network: programs of puts (one-sided writes) and reduces, their synthesis, and
topologies.

`programs` has the programs: their frozen form, builder, checker, executor and other libraries'
formats. `topology` reads, builds and detects networks. `synthesis` makes a program for a network
with an algorithm (`classics`, `forestcoll`, `taccl`), `simulate` predicts its time and `page` draws
it. This package does not depend on plans. Users call it as ark.comm and through `ark topo`.
"""
