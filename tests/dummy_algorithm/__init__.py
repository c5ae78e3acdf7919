"""An algorithm of another package: every gradient is a step of its own, however old its weights were."""
