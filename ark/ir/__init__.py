"""The graph that front ends build: data types, tensors, operators, the model that holds them."""
