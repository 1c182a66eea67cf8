"""Checks on a device each property that the loop kernel relies on, by a small kernel of its own.

`ark doctor` runs it on new hardware, drivers or links, before any model is suspected. The kernels
use the device ABI alone (docs/device-abi.md), so one source serves every vendor. The pages on the
first hour on new hardware in docs/ explain the verdicts and the remedies.
"""
