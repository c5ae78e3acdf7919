"""A run on one page, and several side by side: `report.html`, and what `smolcluster compare` shows."""
