"""Reports, comparisons and explanations of recorded runs, read from their files."""
