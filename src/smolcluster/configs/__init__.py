"""Configuration: shapes, loading, and resolving files, environment and overrides into one."""
