"""Files and folders: written whole or not at all, and checked when read."""
