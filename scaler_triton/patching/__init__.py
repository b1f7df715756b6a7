"""`patch_torch`: our classes under torch's names."""
