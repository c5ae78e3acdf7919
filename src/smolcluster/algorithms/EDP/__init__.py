"""Elastic Distributed Parallelism: an asynchronous parameter server."""
