"""What parameter servers share, whatever their algorithm."""
