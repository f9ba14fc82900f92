"""Authentication and limits of a request: API keys, operators, origins."""
