"""The requested composition and its plan, module by module: pure data, no tensors, no torch."""
