"""The door between ark and the vendors: what a backend offers, and how it is found."""
