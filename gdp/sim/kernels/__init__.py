"""The compiled parts of the simulator."""
