"""From a graph to a plan: fusion, tiling, tile tasks, the choice of packets."""
