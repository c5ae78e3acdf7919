"""What a run leaves behind: its folder, its events and its summary."""
