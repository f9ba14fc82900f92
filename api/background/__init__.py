"""Background tasks of an API process: requests of dead API processes, snapshots and samples of the farm, its
heartbeat."""
