"""HTTP routes, each tried as a client calls it, and the OpenAPI document of them."""
