"""The supervisor of a host, which is the parent of agent, ranks and standby, and its protocol."""
