"""Requests as clients send them, types and validation; and answers as structs."""
