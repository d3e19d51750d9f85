"""Analysis of run directories: the curves of one run, the comparison of several."""
