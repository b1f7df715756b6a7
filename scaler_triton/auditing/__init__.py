"""The audit: have the ranks split? For a running job or saved states, with torch's scalers or ours."""
