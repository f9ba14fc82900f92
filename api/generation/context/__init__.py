"""A conversation made shorter before its prompt is made: truncation, and edits that the client asks for."""
