"""Measurements: decoding with ark and with alternatives that a user could choose."""
