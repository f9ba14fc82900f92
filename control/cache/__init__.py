"""The user's cache of files that make the next start faster: listed, removed, limited."""
