"""A farm on one machine: the private server and the supervisor of the processes."""
