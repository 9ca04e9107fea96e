"""Small generated worlds whose judge is exact."""
