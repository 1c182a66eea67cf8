"""Task kinds: what a tile of work touches, costs, and how it is written as source."""
