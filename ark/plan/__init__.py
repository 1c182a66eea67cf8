"""From a graph to a verified plan: machine models, lowering, scheduling, memory, counters, proof."""
