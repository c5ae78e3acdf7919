"""Codecs: how a bucket of numbers is written in bytes, and error feedback around them."""
