"""Common torch ops in many shapes: the cases of `ark bench ops "sweep-*"`."""
