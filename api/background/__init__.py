"""Background tasks of an API process: requests of dead API processes, samples of the farm, its heartbeat."""
