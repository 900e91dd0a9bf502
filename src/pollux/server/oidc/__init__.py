"""Logins of an OpenID Connect issuer: bearer tokens that it has signed, in place of Pollux's own."""
