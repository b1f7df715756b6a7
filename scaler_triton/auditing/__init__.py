"""The audit: have the ranks of a run split? For a running job or saved states; works with torch's scalers, too."""
