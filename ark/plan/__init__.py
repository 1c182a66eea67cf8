"""From a graph to a verified plan: machines, lowering, schedule, memory, counters, proof."""
