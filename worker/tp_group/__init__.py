"""The tensor-parallel group: fan-out of commands by the leader, execution by each rank."""
