"""Common torch ops in many shapes, which are the cases of `ark bench ops "sweep-*"`."""
