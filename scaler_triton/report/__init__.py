"""What happened: which parameter overflowed, on which rank, and how often."""
