"""What every part may use: errors, files, progress, processes, style."""
