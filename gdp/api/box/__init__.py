"""Several models on one box: the question, prices of each model alone, the answer, exports."""
