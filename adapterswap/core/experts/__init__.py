"""An expert on disk, from its config and headers alone: no tensor, no torch."""
