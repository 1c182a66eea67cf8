"""Measurements of ark's speed and accuracy, and of the alternatives that a user could choose
instead (here called peers, such as torch or onnxruntime). The commands `ark bench` and `ark tune`
call this package.
"""
