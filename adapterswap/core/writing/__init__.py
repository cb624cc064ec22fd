"""Write a plan: an adapter folder or full weights, with its record and its card."""
