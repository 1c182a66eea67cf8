"""Collectives that fit any network: topologies in, checked programs of puts and reduces out.

Users import `topology` and `synthesize` from here; `ark topo` is the same on the command line. The
package stands on its own, and the plan takes its programs as it takes any other collective.
"""

from ark.comm import topology
from ark.comm.synthesis import algorithms, synthesize

__all__ = ["algorithms", "synthesize", "topology"]
