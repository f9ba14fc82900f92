"""Connections to Redis: clients for one server, Sentinel and Cluster, script calls and their retries, and outages."""
