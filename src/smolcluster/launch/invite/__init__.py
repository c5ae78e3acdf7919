"""Joining without SSH: a code, which somebody types on the machine that joins."""
