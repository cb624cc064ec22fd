"""What an expert does to one weight of the base: data, and the reading of it."""
