"""An expert or a base on disk, read from configs and headers alone: no tensor, no torch."""
