"""Training on many ranks: how the work is cut, and what keeps the result independent of the cut."""
