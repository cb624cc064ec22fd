"""How several changes of one module are combined: the registry of methods.

Layer swaps and partitions are allocations: they say which expert owns a module. A method says what becomes of a module
that several experts share.
"""
