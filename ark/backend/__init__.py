"""The protocol of backends, and their discovery."""
