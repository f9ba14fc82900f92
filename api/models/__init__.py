"""The models that this process serves, their files in processes of their own, and the farm as operators see it."""
