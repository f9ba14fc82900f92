"""Agents and ranks: the processes that own devices and run models. Never imports the API."""
