"""Whose tokens to accept, and who is who: the table ``oidc`` of a configuration file. No I/O."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from pollux.api.access import ROLES, Role
from pollux.errors import InputFileError
from pollux.server.notify.config import Table
from pollux.tls import is_loopback_url

# Those with a private key at the issuer alone. A shared secret (HS256) would let this server make tokens, and "none"
# every program.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
DEFAULT_ALGORITHMS = ("RS256", "ES256")
_KEYS = (
    *("issuer", "audience", "algorithms", "ca-file", "timeout-s", "user-claim"),
    *("role-claim", "roles", "team", "team-claim", "teams"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcConfig:
    """``roles`` and ``teams``: by a value of their claim, what its holder is. A claim may be a text or a list.

    A user that is not known yet is added if a team is found: by ``team_claim`` and ``teams``, else ``team``.
    """

    issuer: str  # a URL, as its tokens name it
    audience: str
    algorithms: tuple[str, ...] = DEFAULT_ALGORITHMS
    user_claim: str = "preferred_username"
    role_claim: str = ""  # "": all are members
    roles: Mapping[str, Role] = field(default_factory=dict)
    team: str = ""  # of new users; "": none is added
    team_claim: str = ""
    teams: Mapping[str, str] = field(default_factory=dict)
    ca_file: Path | None = None  # that signed the issuer's certificate; None: the system's
    timeout_s: float = 5.0  # of a question to the issuer


def read_oidc(path: Path, values: object) -> OidcConfig | None:
    """Of the table ``oidc`` of the file ``path``; None if there is none.

    Raises:
        InputFileError: a key is not known, a value is of no use, or the library is not installed.
    """
    if values is None:
        return None
    table = Table(path, "oidc", values, _KEYS)
    issuer = table.text("issuer")
    if not is_issuer_url(issuer):
        raise table.error("issuer", issuer, "an https URL is needed, as in https://login.example.org/realms/lab")
    algorithms = table.texts("algorithms", list(DEFAULT_ALGORITHMS))
    for one in algorithms:
        if one not in ALGORITHMS:
            raise table.error("algorithms", one, f"one or more of {', '.join(ALGORITHMS)} are needed")
    if not algorithms:
        raise table.error("algorithms", algorithms, f"one or more of {', '.join(ALGORITHMS)} are needed")
    roles = _texts_by_text(table, "roles")
    for value, role in roles.items():
        if role not in ROLES:
            raise table.error(f"roles.{value}", role, f"one of {', '.join(ROLES)} is needed")
    for key, claim in (("roles", "role-claim"), ("teams", "team-claim")):
        if bool(table.values.get(key)) != bool(table.values.get(claim)):
            raise InputFileError(path, f"oidc.{key} and oidc.{claim} belong together: give both, or none")
    if importlib.util.find_spec("jwt") is None:
        raise InputFileError(path, 'oidc needs PyJWT, not installed here: pip install "pollux-scheduler[oidc]"')
    ca_file = table.text("ca-file", "")
    return OidcConfig(
        issuer=issuer,
        audience=table.text("audience"),
        algorithms=tuple(algorithms),
        user_claim=table.text("user-claim", "preferred_username"),
        role_claim=table.text("role-claim", ""),
        roles={value: role for value, text in roles.items() for role in ROLES if role == text},
        team=table.text("team", ""),
        team_claim=table.text("team-claim", ""),
        teams=_texts_by_text(table, "teams"),
        ca_file=path.parent / ca_file if ca_file else None,
        timeout_s=table.seconds("timeout-s", 5.0),
    )


def is_issuer_url(text: object) -> bool:
    """Whether keys may be fetched there: by https, or on this machine."""
    try:
        parts = urlsplit(str(text))
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
    is_plain = str(text).isprintable() and " " not in str(text) and not parts.username
    return is_url and is_plain and (parts.scheme == "https" or is_loopback_url(str(text)))


def _texts_by_text(table: Table, key: str) -> dict[str, str]:
    value = table.values.get(key, {})
    if not isinstance(value, Mapping) or not all(isinstance(one, str) for one in value.values()):
        raise table.error(key, value, "a table of texts is needed, as in { admins = 'admin' }")
    return dict(value)
