"""What `import smolcluster` gives: see `smolcluster.__all__`."""
