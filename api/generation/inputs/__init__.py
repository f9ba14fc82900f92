"""Requests for vectors and scores: their inputs as tokens, packed into requests of the queue."""
