"""What a plan costs on a named GPU."""
