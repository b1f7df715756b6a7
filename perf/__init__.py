"""Is it cheaper than torch's scaler? `python -m perf` answers, one script a question, both in the same run."""
