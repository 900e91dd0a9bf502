"""Tells the holder of a token that an OpenID Connect issuer has signed. ``Access`` asks it.

Checked are the signature (by the issuer's published keys and the algorithms of the configuration alone), the issuer,
the audience and the times. Which user, role and team the holder has is read from the token's claims.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from pollux.api.access import ROLES, Role, UserChange, check_account_name
from pollux.errors import AccessDeniedError, InvalidValueError
from pollux.server.http.auth import NeedsWork, Person
from pollux.server.live.accounts import Accounts
from pollux.server.oidc.config import OidcConfig
from pollux.server.oidc.keys import IssuerKeys

LEEWAY_S = 60.0  # between two machines' clocks
MAX_TOKEN_LENGTH = 16_384
NUM_REMEMBERED = 1024  # tokens that were found good: a client sends the same one again and again
REMEMBERED_S = 300.0  # then it is checked again, by the keys of then

logger = logging.getLogger(__name__)


def persons_of(config: OidcConfig | None, accounts: Callable[[], Accounts]) -> Callable[[str], Person | None]:
    """Tells whom a token belongs to: one of Pollux's own, or with a ``config`` one that an issuer has signed."""
    if config is None:
        return lambda token: accounts().person_of(token)
    signed = OidcVerifier(config, accounts)
    return lambda token: accounts().person_of(token) or signed.person_of(token)


class OidcVerifier:
    """``accounts``: where the users are. Any thread may ask."""

    def __init__(self, config: OidcConfig, accounts: Callable[[], Accounts]) -> None:
        self._config, self._accounts = config, accounts
        self._keys = IssuerKeys(config)
        self._good: OrderedDict[str, tuple[float, Mapping[str, Any]]] = OrderedDict()  # until when, and its claims

    def person_of(self, token: str) -> Person | None:
        """Whom a token belongs to; None: it is no signed token. Never waits.

        Raises:
            AccessDeniedError: it is one, and not good.
            NeedsWork: something has to be fetched or written first.
        """
        if token.count(".") != 2 or len(token) > MAX_TOKEN_LENGTH:
            return None
        claims = self._claims_of(token)
        if claims is None:
            return None
        name = self._name_in(claims)
        role = self._role_in(claims)
        known = self._accounts().role_of(name)
        if known is None:
            team = self._team_in(claims)
            if not team:
                raise AccessDeniedError(
                    f"user {name!r} is not known here, and no team is named for new ones; ask an admin to add you: "
                    f"pollux user add {name} --team TEAM"
                )
            if self._accounts().has_unix_users:
                raise AccessDeniedError(
                    f"user {name!r} is not known here, and jobs of a user without a Unix user would run as root; ask "
                    f"an admin to add you: pollux user add {name} --team {team} --unix-user USER"
                )
            raise NeedsWork(lambda: self._add(name, role, team))
        return Person(user=name, role=max(role, known, key=ROLES.index))  # that which may do less

    # The token --------------------------------------------------------------------------------

    def _claims_of(self, token: str) -> Mapping[str, Any] | None:
        digest = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
        ends_at, claims = self._good.get(digest, (0.0, {}))
        if time.time() < ends_at:
            return claims
        found = self._verified(token)
        if found is not None:
            self._good[digest] = min(time.time() + REMEMBERED_S, float(found["exp"])), found
            while len(self._good) > NUM_REMEMBERED:
                self._good.popitem(last=False)
        return found

    def _verified(self, token: str) -> Mapping[str, Any] | None:
        import jwt  # type: ignore[import-not-found,unused-ignore]

        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            return None  # a text with two dots
        key_id, algorithm = header.get("kid", ""), header.get("alg")
        if algorithm not in self._config.algorithms:
            allowed = ", ".join(self._config.algorithms)
            raise AccessDeniedError(f"this token is signed by {algorithm!r:.40}; {allowed} are accepted")
        if not isinstance(key_id, str) or self._keys.is_due(key_id):
            raise NeedsWork(lambda: self._keys.fetch(str(key_id)))
        key = self._keys.find(key_id)
        if key is None or key.algorithm not in (None, algorithm):
            raise AccessDeniedError(f"this token is signed with a key that {self._config.issuer} does not publish")
        try:
            claims: Mapping[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=list(self._config.algorithms),
                audience=self._config.audience,
                issuer=self._config.issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud"], "strict_aud": False},
            )
        except jwt.ExpiredSignatureError:
            raise AccessDeniedError(f"this token has expired; get another from {self._config.issuer}") from None
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise AccessDeniedError(f"this token is not accepted: {error}") from None
        return claims

    # What it says -----------------------------------------------------------------------------

    def _name_in(self, claims: Mapping[str, Any]) -> str:
        value = claims.get(self._config.user_claim)
        try:
            return check_account_name("user", value if isinstance(value, str) else "")
        except InvalidValueError as error:
            raise AccessDeniedError(f"the claim {self._config.user_claim!r} of this token: {error}") from None

    def _role_in(self, claims: Mapping[str, Any]) -> Role:
        """The one that may do most. Admins are made by the configuration alone, so without a claim all are members."""
        if not self._config.role_claim:
            return "member"
        found = {self._config.roles[value] for value in _texts(claims, self._config.role_claim) & {*self._config.roles}}
        for role in ROLES:
            if role in found:
                return role
        raise AccessDeniedError(f"the claim {self._config.role_claim!r} of this token gives no role here")

    def _team_in(self, claims: Mapping[str, Any]) -> str:
        values = _texts(claims, self._config.team_claim) if self._config.team_claim else set()
        return next((team for value, team in self._config.teams.items() if value in values), self._config.team)

    def _add(self, name: str, role: Role, team: str) -> None:
        """Raises PolluxError."""
        accounts = self._accounts()
        if accounts.role_of(name) is None:
            try:
                accounts.set_user(name, UserChange(team=team, role=role), is_new=True)
            except InvalidValueError:
                if accounts.role_of(name) is None:  # else another request was quicker
                    raise
            logger.info("user %s: by %s, %s of team %s", name, self._config.issuer, role, team)


def _texts(claims: Mapping[str, Any], name: str) -> set[str]:
    value = claims.get(name)
    values = [value] if isinstance(value, str) else value
    return {one for one in values if isinstance(one, str)} if isinstance(values, list) else set()
