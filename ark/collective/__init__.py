"""Collectives of a network: programs of puts and reduces, their synthesis, and topologies.

`programs` has the programs: their frozen form, builder, checker, executor and other libraries'
formats. `topology` reads, builds and detects networks. `synthesis` makes a program for a network by
an algorithm (`classics`, `forestcoll`, `taccl`), `simulate` predicts its time and `page` draws it.
This package does not depend on plans. Users reach it as ark.comm, and by `ark topo`.
"""
