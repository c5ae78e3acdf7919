"""What every distributed algorithm needs: leases, membership, sessions and the inbox."""
