"""DiLoCo: workers take many local steps, the server steps along the mean of what they changed."""
