"""Official clients and frameworks, run against a farm."""
