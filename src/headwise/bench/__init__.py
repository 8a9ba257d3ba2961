"""headwise measured against its peers, all in one run: what `headwise bench` does."""
