"""HSDAG: groups that are learned, and a policy gradient on one graph (arXiv 2405.14185)."""
