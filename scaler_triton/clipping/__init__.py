"""Unscale and clip in one: a pass that reads, one reduction, a pass that writes."""
