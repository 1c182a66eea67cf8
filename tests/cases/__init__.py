"""Cases and helpers that several test files share; no file here has tests of its own."""
