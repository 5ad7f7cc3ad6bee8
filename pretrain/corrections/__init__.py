"""Pre-training of the correction network over public measurements of engines."""
