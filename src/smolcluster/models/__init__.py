"""Models that a training file can name."""
