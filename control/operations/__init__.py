"""The operations of an operator, shared by the command line and the HTTP API."""
