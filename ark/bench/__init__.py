"""Measurements: decoding with ark, and with the peers a user would otherwise take."""
