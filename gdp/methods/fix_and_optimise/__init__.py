"""Mixed-integer programs of one region of a placement after another, where memory is tight."""
