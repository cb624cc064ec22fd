"""How several changes of one module are combined: the registry of methods.

Layer swaps and partitions are allocations: they say which expert owns a module. A method combines the changes of
experts that share a module.
"""
