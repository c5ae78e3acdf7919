"""Peers: authenticated sessions between any two processes, and the events that come from them."""
