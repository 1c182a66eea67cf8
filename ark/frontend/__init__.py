"""The objects that op calls act on: tensor handles, the current model, and their memory."""
