"""The issuer's public keys: fetched over HTTPS with bounds, and kept in memory. The verifier calls it, in a thread."""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, NoReturn

from pollux.errors import ServerUnavailableError
from pollux.server.oidc.config import OidcConfig, is_issuer_url
from pollux.tls import client_context

FRESH_S = 600.0  # then they are fetched again
STALE_S = 86400.0  # so long they are used while the issuer is away
PAUSE_S = 10.0  # between two attempts: anyone can name a key that there is none of
MAX_WAITING = 4  # threads, while an attempt lasts: an issuer may be slow, and others need threads, too
MAX_BYTES = 1 << 20
DISCOVERY = "/.well-known/openid-configuration"

logger = logging.getLogger(__name__)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:  # the address is the operator's to say
        return None


@dataclass(frozen=True, slots=True)
class PublicKey:
    key: Any
    algorithm: str | None  # that it is for; None: any of its kind


class IssuerKeys:
    """Any thread may ask. Only :meth:`fetch` waits."""

    def __init__(self, config: OidcConfig) -> None:
        self._config, self._turn = config, threading.Lock()
        self._room, self._is_fetching = threading.BoundedSemaphore(MAX_WAITING), False
        self._keys: Mapping[str, PublicKey] = {}  # by their ids
        self._fetched_at = self._tried_at = float("-inf")

    def find(self, key_id: str) -> PublicKey | None:
        """The key with this id, "": the only one. None: there is no such key."""
        if time.monotonic() - self._fetched_at > STALE_S:
            return None
        keys = self._keys
        return next(iter(keys.values())) if not key_id and len(keys) == 1 else keys.get(key_id)

    def is_due(self, key_id: str) -> bool:
        """Whether to fetch them before this key is looked for."""
        now, is_known = time.monotonic(), self.find(key_id) is not None
        if is_known and self._is_fetching:
            return False  # those of before are good enough meanwhile
        is_wanted = now - self._fetched_at > FRESH_S or not is_known
        return is_wanted and now - self._tried_at > PAUSE_S

    def fetch(self, key_id: str) -> None:
        """Once, also if several callers ask meanwhile. A failure leaves the keys as they are.

        Raises:
            ServerUnavailableError: there are no keys yet, and the issuer gives none; or too many wait for them.
        """
        if not self._room.acquire(blocking=False):
            raise ServerUnavailableError(f"the keys of {self._config.issuer} are being fetched; try again later")
        try:
            self._fetch_in_turn(key_id)
        finally:
            self._room.release()

    def _fetch_in_turn(self, key_id: str) -> None:
        with self._turn:
            if not self.is_due(key_id):  # another thread was quicker
                return
            self._is_fetching = True
            try:
                self._keys = self._ask()
                self._fetched_at = time.monotonic()
            except (OSError, HTTPException, ValueError) as error:
                reason = f"the keys of {self._config.issuer} cannot be had: {error}"
                logger.warning("%s", reason)
                if not self._keys:
                    raise ServerUnavailableError(f"{reason}; try again later, or use a token of Pollux") from error
            finally:
                self._is_fetching, self._tried_at = False, time.monotonic()  # a slow attempt is no pause

    def _ask(self) -> dict[str, PublicKey]:
        import jwt  # type: ignore[import-not-found,unused-ignore]

        about = self._get(f"{self._config.issuer.rstrip('/')}{DISCOVERY}")
        if about.get("issuer") != self._config.issuer:
            raise ValueError(f"it calls itself {about.get('issuer')!r:.200}")
        if not is_issuer_url(about.get("jwks_uri")):
            raise ValueError(f"jwks_uri = {about.get('jwks_uri')!r:.200}; an https URL is needed")
        found = self._get(about["jwks_uri"]).get("keys")
        keys: dict[str, PublicKey] = {}
        for entry in found if isinstance(found, list) else ():
            if isinstance(entry, dict) and entry.get("use", "sig") == "sig" and entry.get("kty") != "oct":
                try:
                    keys[str(entry.get("kid", ""))] = PublicKey(jwt.PyJWK(entry).key, entry.get("alg"))
                except jwt.PyJWTError as error:  # of a kind that the library does not know
                    logger.info("a key of %s is left out: %s", self._config.issuer, error)
        if not keys:
            raise ValueError("it has no key to sign with")
        return keys

    def _get(self, url: str) -> dict[str, Any]:
        context = client_context(None if self._config.ca_file is None else str(self._config.ca_file))
        handlers = (_NoRedirects(), urllib.request.HTTPSHandler(context=context), urllib.request.ProxyHandler())
        request = urllib.request.Request(url, headers={"Accept": "application/json"})
        with urllib.request.build_opener(*handlers).open(request, timeout=self._config.timeout_s) as answer:
            text = answer.read(MAX_BYTES + 1)
        if len(text) > MAX_BYTES:
            _refuse(f"{url}: more than {MAX_BYTES >> 20} MiB")
        found = json.loads(text)
        return found if isinstance(found, dict) else _refuse(f"{url}: no JSON object")


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
