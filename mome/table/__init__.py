"""Tables of rows that a step sees only through a working set."""
