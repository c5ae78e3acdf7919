"""Turning a configuration into processes."""
