"""Runs plans: loads programs, starts launches, talks to running kernels, ranks, traces."""
