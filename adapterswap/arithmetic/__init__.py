"""The numbers of a plan, in numpy: the tensors of its result, and their values."""
