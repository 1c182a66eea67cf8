"""Models from checkpoint directories: their shape (config), weights (checkpoint) and tokenizer."""
