"""Chat templates, and the parsing of answers for reasoning and tool calls."""
