"""What outputs say of themselves: adapterswap.json and the model card."""
