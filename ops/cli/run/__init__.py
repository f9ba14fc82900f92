"""`furrow run`: a conversation with a model in a terminal, or one answer in a pipe."""
