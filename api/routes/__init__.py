"""HTTP routes, and the OpenAPI document of them."""
