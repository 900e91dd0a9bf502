"""The messages that jobs, server, client and command line exchange: plain frozen dataclasses, one definition each.

``pollux.train`` sends them, the server validates requests and returns answers, the client decodes answers. OpenAPI is
generated from them. :mod:`pollux.api.codec` turns them into JSON and back.
"""
