"""Frameworks that build the scaler, clip, or ask whether a step was skipped: one file each, imported by its name."""
