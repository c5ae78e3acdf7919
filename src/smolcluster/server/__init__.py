"""A server and its workers: who takes part, leases, weights and their slices, evaluation, reports."""
