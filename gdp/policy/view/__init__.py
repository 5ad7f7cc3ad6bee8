"""What the network sees of a problem."""
