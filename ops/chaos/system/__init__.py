"""The system under test: farm, Redis servers, and the proxy between them."""
