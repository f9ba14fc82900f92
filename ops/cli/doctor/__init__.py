"""`furrow doctor`: a check of Redis, hosts, models and the API, with a remedy for each finding."""
