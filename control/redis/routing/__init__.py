"""Commands to the shards of a Redis Cluster."""
