"""`smolcluster advise`: what is worth distributing, and how, from measured machines and links."""
