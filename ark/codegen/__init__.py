"""Writes the loop kernel: one writer, a dialect per vendor, a specialised function per task kind."""
