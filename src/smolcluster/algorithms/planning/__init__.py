"""What a run will cost before it runs: pure functions of measured machines and links."""
