"""Programs listed op by op, whatever they were traced with, and the graphs made of them."""
