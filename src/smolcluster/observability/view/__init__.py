"""A run as it is looked at: read from its files as they grow, in bounded memory. Knows nothing of the web."""
