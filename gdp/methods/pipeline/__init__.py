"""The dynamic program over down-sets."""
