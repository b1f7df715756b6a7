"""Has this run split? Asked of its ranks, or of what they saved; of torch's scalers, too."""
