"""What the scaler notices: programs that would train wrongly without a word. It is told of cold events only."""
