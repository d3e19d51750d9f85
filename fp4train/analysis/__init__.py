"""What a run directory can tell: curves of one run, the comparison of several."""
