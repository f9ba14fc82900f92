"""The prefix cache: beginnings that sequences share, and the recurrent states at which they can be continued."""
