"""The models that this process serves: which one a request means, and their files in confined processes of their
own."""
