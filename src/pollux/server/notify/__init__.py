"""Tells people and programs of what happens: by a webhook, by mail."""
