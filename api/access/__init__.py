"""Who asks, and whether they may: identities, API keys kept in memory, and the limits of a key."""
