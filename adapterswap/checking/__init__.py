"""Compare what was written with what it was made of. Writes nothing."""
