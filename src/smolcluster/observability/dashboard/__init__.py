"""A run on a local web page: what `view` reads, served to one person's browser."""
