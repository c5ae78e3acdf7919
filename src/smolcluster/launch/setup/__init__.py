"""Configuration: made for your machines, shown and checked."""
