"""Signs of life of a rank: what it has done, and whether it gets on."""
