"""Asks a device what the loop kernel relies on, each promise by a small kernel of its own.

`ark doctor` runs it: for the first hour on new hardware, a driver or a link, before any model is
blamed. The kernels stand on the device ABI alone (docs/device-abi.md), so that one text asks every
vendor. What each verdict means, and what to do about a failure, is told in the pages on the first
hour on new hardware in docs/.
"""
