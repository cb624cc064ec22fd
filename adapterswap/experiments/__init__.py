"""Training, evaluating, sweeping and reporting: what is built on compositions."""
