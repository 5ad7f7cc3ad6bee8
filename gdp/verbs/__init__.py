"""What the verbs do beside placing: running, exporting, fine-tuning, and saying what is what."""
