"""The models that this process serves: which one a request means, their files in confined processes, the farm as
operators see it."""
