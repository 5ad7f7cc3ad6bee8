"""Image and video pipelines on several devices: question, prices, answer, exports."""
