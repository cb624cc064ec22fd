"""From a request to a written result: bases, experts, changes, methods, plans, writing. Needs numpy, not torch."""
