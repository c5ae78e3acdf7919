"""Grafana, Loki and Prometheus beside a run: started, asked how they are, told where `/metrics` is."""
