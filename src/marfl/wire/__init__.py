"""Updates as small integers: how they are made, how they are packed, and what of them is left for the next time."""
