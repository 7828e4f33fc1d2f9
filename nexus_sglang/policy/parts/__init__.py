"""Building blocks of policies, one's own included: random draws, window reductions, the walk, selectors."""
