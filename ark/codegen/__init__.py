"""Writes the loop kernel: one writer, a dialect per vendor, a function per kind and signature."""
