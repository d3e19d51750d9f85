"""The estimated cost of a plan on a named GPU."""
