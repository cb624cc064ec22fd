"""How an expert changes one weight of the base: the data, and how it is read."""
