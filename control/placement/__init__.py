"""Which host runs which rank: the planner, rolling changes, hosts and assignments."""
