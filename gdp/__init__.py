"""gdp decides on which device each operator of a neural network runs."""
