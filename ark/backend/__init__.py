"""Backend protocol and discovery: what a backend offers, and how backends are found."""
