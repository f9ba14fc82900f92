"""What clients send and what they get, as structs and as ready-made bytes, with OpenAI's field names."""
