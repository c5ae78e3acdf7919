"""Small things that know nothing of training or networks."""
