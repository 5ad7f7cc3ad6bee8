"""Dataflow graphs: their files, groups of ops, and fusion."""
