"""Connections to Redis: URLs, clients for one server, Sentinel and Cluster, passwords, retries and outages."""
