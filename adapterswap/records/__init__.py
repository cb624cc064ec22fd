"""What outputs say about themselves: adapterswap.json and the model card."""
