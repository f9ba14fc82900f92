"""Commands about requests: dead letters, and requests computed again."""
