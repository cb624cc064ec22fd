"""What is asked for and what will be done, module by module: pure data, no tensor and no torch."""
