"""`smolcluster top`: the cluster in a terminal, drawn anew every second."""
