"""Synchronous Parameter Server: exact synchronous training on unequal machines."""
