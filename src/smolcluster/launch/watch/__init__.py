"""Looking at runs, wherever they are."""
