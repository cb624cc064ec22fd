"""Tools around composing: convert, extract, compare, inspect and verify."""
