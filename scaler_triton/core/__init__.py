"""A step, and nothing else: it knows none of the rooms around it."""
