"""The objects on which op calls such as ark.add act: tensor handles, the current model to which
calls add nodes, and the tensors' memory.
"""
