"""The pipeline of least period, by a mixed-integer program solved in rounds."""
