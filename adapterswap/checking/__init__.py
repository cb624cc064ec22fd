"""Compare outputs with their sources. Writes nothing."""
