"""The numbers of a plan, in numpy: which tensors its result holds, and what stands in them."""
