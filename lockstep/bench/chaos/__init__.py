"""Runs that are killed, stopped, starved and cut off on purpose, and whether anything is lost by it."""
