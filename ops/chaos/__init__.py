"""`furrow chaos`: faults under streaming load, and a checker that compares every stream with the undisturbed one."""
