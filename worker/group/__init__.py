"""Groups: one model that several processes run together. Rank 0 plans, its followers replay the plans."""
