"""Tokens of an OpenID Connect issuer, which runs on the loopback: who gets in, as whom, and who does not."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

jwt = pytest.importorskip("jwt", reason="needs the extra oidc")
pytest.importorskip("cryptography", reason="needs the extra oidc")

from pollux.api.access import TeamChange, UserChange  # noqa: E402
from pollux.errors import InputFileError, ServerUnavailableError  # noqa: E402
from pollux.server.http.app import create_app  # noqa: E402
from pollux.server.http.auth import Access  # noqa: E402
from pollux.server.live.trials import ClusterJobs  # noqa: E402
from pollux.server.oidc import keys as keys_module  # noqa: E402
from pollux.server.oidc.config import OidcConfig, read_oidc  # noqa: E402
from pollux.server.oidc.verifier import persons_of  # noqa: E402
from pollux.tune.studies import Studies  # noqa: E402
from tests.unit.server.live.world import World  # noqa: E402
from tests.unit.server.oidc.issuer import AUDIENCE, Issuer, serving  # noqa: E402

TOKEN = "operator-token-0123456789"


class Lab:
    """A server that trusts an issuer, without a network of its own."""

    def __init__(self, folder: Path, issuer: Issuer) -> None:
        self.issuer, self.world, self.folder = issuer, World(folder), folder
        self.world.cluster.start()
        self.accounts = self.world.cluster.accounts
        self.accounts.set_team("vision", TeamChange(), is_new=True)
        self.accounts.set_team("nlp", TeamChange(), is_new=True)
        self.accounts.set_user("ada", UserChange(team="vision", role="admin"), is_new=True)
        self.studies = Studies(folder, ClusterJobs(self.world.cluster, -1.0))

    def client(self, **options: Any) -> TestClient:
        config = OidcConfig(issuer=self.issuer.url, audience=AUDIENCE, **options)
        access = Access(TOKEN, self.world.cluster.job_of_token, persons_of(config, lambda: self.accounts))
        app = create_app(self.world.cluster, access, lambda keeps_jobs: None, self.studies)
        return TestClient(app, base_url="http://localhost/api/v1")

    def close(self) -> None:
        self.studies.stop()
        self.world.cluster.stop(keeps_jobs=True)
        self.world.store.close()


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with serving() as issuer:
        made = Lab(tmp_path, issuer)
        yield made
        made.close()


def ask(client: TestClient, token: str) -> tuple[int, Any]:
    answer = client.get("/me", headers={"Authorization": f"Bearer {token}"})
    said = answer.json()
    return answer.status_code, said["error"]["message"] if answer.status_code != 200 else said


def test_a_token_of_the_issuer_is_its_users(lab):
    client = lab.client()
    # Without a claim for roles all are members, whatever the account may do.
    assert ask(client, lab.issuer.token()) == (200, {"user": "ada", "team": "vision", "role": "member"})
    assert ask(client, lab.issuer.token("ada", aud=["another", AUDIENCE]))[0] == 200
    assert lab.issuer.calls == ["/.well-known/openid-configuration", "/keys"]  # once
    job = {"command": ["true"], "kind": "fixed", "name": "mine"}
    headers = {"Authorization": f"Bearer {lab.issuer.token()}"}
    assert client.post("/jobs", json=job, headers=headers).json()["jobs"][0]["owner"] == "ada"
    assert ask(client, TOKEN)[1]["user"] == "operator"  # our own tokens work as before
    assert ask(client, "not.a.token")[0] == 401


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"aud": "another"}, "Audience doesn't match"),
        ({"aud": None}, 'missing the "aud" claim'),
        ({"iss": "https://evil.example"}, "Invalid issuer"),
        ({"iss": None}, 'missing the "iss" claim'),
        ({"exp": 1}, "has expired"),
        ({"exp": None}, 'missing the "exp" claim'),
        ({"nbf": 1 << 40}, "not yet valid"),
        ({"preferred_username": None}, "the claim 'preferred_username' of this token: user ''"),
        ({"preferred_username": "operator"}, "not 'operator', which is the server's own"),
        ({"preferred_username": "../ada"}, "of A-Z a-z"),
        ({"preferred_username": ["ada"]}, "of A-Z a-z"),
    ],
)
def test_a_token_that_is_not_for_this_server_is_refused(lab, claims, said):
    status, message = ask(lab.client(), lab.issuer.token(**claims))
    assert status == 401 and said in message, message


def test_forged_tokens_are_refused(lab):
    client, good = lab.client(), lab.issuer.token()
    head, body, seal = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    pem = lab.issuer.public_pem()

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    shared = f"{part({'alg': 'HS256', 'kid': 'first'})}.{body}"
    by_public_key = base64.urlsafe_b64encode(hmac.digest(pem, shared.encode(), hashlib.sha256)).rstrip(b"=").decode()
    stranger = jwt.encode(claims, Issuer("http://x").rsa_key, algorithm="RS256", headers={"kid": "first"})
    forged = {
        "unsigned": f"{part({'alg': 'none', 'kid': 'first'})}.{body}.",
        "by the public key as a secret": f"{shared}.{by_public_key}",
        "another's claims": f"{head}.{part({**claims, 'preferred_username': 'root'})}.{seal}",
        "another's key": stranger,
        "another kind of key": f"{part({'alg': 'ES256', 'kid': 'first'})}.{body}.{seal}",
        "a key of its own": jwt.encode(
            claims, Issuer("http://x").rsa_key, algorithm="RS256", headers={"kid": "first", "jku": "http://evil/keys"}
        ),
        "too long": f"{head}.{body * 100}.{seal}",
    }
    assert ask(client, good)[0] == 200
    for what, token in forged.items():
        assert ask(client, token)[0] == 401, what


def test_keys_change_and_an_unknown_one_does_not_make_the_server_ask_again_and_again(lab, monkeypatch):
    monkeypatch.setattr(keys_module, "PAUSE_S", 600.0)
    client = lab.client()
    assert ask(client, lab.issuer.token())[0] == 200
    lab.issuer.add_key("second")
    assert ask(client, lab.issuer.token(key_id="second"))[0] == 401  # the keys were fetched a moment ago
    monkeypatch.setattr(keys_module, "PAUSE_S", 0.0)
    assert ask(client, lab.issuer.token(key_id="second"))[0] == 200
    monkeypatch.setattr(keys_module, "PAUSE_S", 600.0)
    num_calls = len(lab.issuer.calls)
    lab.issuer.add_key("hidden")
    for _ in range(20):
        assert ask(client, lab.issuer.token(key_id="hidden"))[0] == 401
    assert len(lab.issuer.calls) == num_calls


def test_a_slow_issuer_is_asked_once_by_few_threads(monkeypatch):
    """Anyone can name keys that there are none of; each held a thread for as long as the issuer took."""
    keys = keys_module.IssuerKeys(OidcConfig(issuer="https://login.example.org", audience=AUDIENCE))
    known, goes_on, asked, refused = {"known": keys_module.PublicKey(None, None)}, threading.Event(), [], []

    def slow() -> dict[str, keys_module.PublicKey]:
        asked.append(1)
        goes_on.wait(20.0)
        time.sleep(0.1)
        return known

    def ask_for(key_id: str) -> None:
        try:
            keys.fetch(key_id)
        except ServerUnavailableError as error:
            refused.append(str(error))

    monkeypatch.setattr(keys, "_ask", slow)
    monkeypatch.setattr(keys_module, "PAUSE_S", 0.05)  # less than an attempt takes
    threads = [threading.Thread(target=ask_for, args=(f"unknown-{number}",)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads[keys_module.MAX_WAITING :]:
        thread.join(1.0)
    assert len(refused) == 12 - keys_module.MAX_WAITING and "try again" in refused[0]
    goes_on.set()
    for thread in threads:
        thread.join(20.0)
    assert len(asked) == 1  # those who waited do not ask again at once


def test_known_keys_are_used_while_they_are_fetched_again(monkeypatch):
    keys = keys_module.IssuerKeys(OidcConfig(issuer="https://login.example.org", audience=AUDIENCE))
    is_asked, goes_on, known = threading.Event(), threading.Event(), {"known": keys_module.PublicKey(None, None)}
    monkeypatch.setattr(keys, "_ask", lambda: known)
    keys.fetch("known")
    monkeypatch.setattr(keys_module, "FRESH_S", 0.0)
    monkeypatch.setattr(keys_module, "PAUSE_S", 0.0)

    def slow() -> dict[str, keys_module.PublicKey]:
        is_asked.set()
        goes_on.wait(20.0)
        return known

    monkeypatch.setattr(keys, "_ask", slow)
    assert keys.is_due("known")
    thread = threading.Thread(target=keys.fetch, args=("known",))
    thread.start()
    assert is_asked.wait(20.0)
    assert not keys.is_due("known") and keys.is_due("unknown")
    goes_on.set()
    thread.join(20.0)


def test_keys_outlive_their_issuer_for_a_while(lab, monkeypatch):
    lab.issuer.is_away = True
    client = lab.client()
    status, message = ask(client, lab.issuer.token())
    assert status == 503 and "cannot be had" in message
    assert ask(client, TOKEN)[0] == 200
    lab.issuer.is_away = False
    monkeypatch.setattr(keys_module, "PAUSE_S", 0.0)
    assert ask(client, lab.issuer.token())[0] == 200
    lab.issuer.is_away = True
    monkeypatch.setattr(keys_module, "FRESH_S", 0.0)
    monkeypatch.setattr(keys_module, "PAUSE_S", 600.0)
    assert ask(client, lab.issuer.token(note="another text"))[0] == 200
    monkeypatch.setattr(keys_module, "STALE_S", 0.0)
    assert ask(client, lab.issuer.token(note="a third one"))[0] == 401


@pytest.mark.parametrize("change", [{"named": "https://evil.example"}, {"redirects_to": "http://127.0.0.1:1/"}])
def test_an_issuer_that_calls_itself_otherwise_or_sends_elsewhere_is_not_believed(lab, change):
    for name, value in change.items():
        setattr(lab.issuer, name, value)
    assert ask(lab.client(), lab.issuer.token())[0] == 503


def test_an_issuer_that_does_not_answer_holds_up_no_other_request(lab):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lab.issuer.url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = lab.client(timeout_s=1.0)
        with client:  # one event loop for both
            found: list[int] = []
            waiting = threading.Thread(target=lambda: found.append(ask(client, lab.issuer.token())[0]))
            began = time.monotonic()
            waiting.start()
            assert ask(client, TOKEN)[0] == 200
            waiting.join(30)
        assert found == [503] and time.monotonic() - began < 20


def test_roles_and_teams_come_from_claims(lab):
    options = {
        "role_claim": "groups",
        "roles": {"lab": "member", "lab-admins": "admin"},
        "team_claim": "groups",
        "teams": {"people-nlp": "nlp"},
    }
    client = lab.client(**options)
    new = lab.issuer.token("cyd", groups=["lab", "people-nlp", 7])
    assert ask(client, new) == (200, {"user": "cyd", "team": "nlp", "role": "member"})
    assert lab.accounts.user("cyd").team == "nlp"
    assert ask(client, lab.issuer.token("ada", groups=["lab-admins"]))[1]["role"] == "admin"
    # No more than the account here, and no more than the claim.
    assert ask(client, lab.issuer.token("cyd", groups=["lab-admins"]))[1]["role"] == "member"
    assert ask(client, lab.issuer.token("ada", groups="lab"))[1]["role"] == "member"
    status, message = ask(client, lab.issuer.token("ada", groups=["guests"]))
    assert status == 401 and "gives no role here" in message
    status, message = ask(client, lab.issuer.token("dan", groups=["lab"]))
    assert status == 401 and "user 'dan' is not known here" in message
    assert ask(lab.client(team="vision"), lab.issuer.token("dan")) == (
        200,
        {"user": "dan", "team": "vision", "role": "member"},
    )


def test_where_jobs_run_as_unix_users_a_new_user_does_not_run_them_as_root(lab):
    """A user without a Unix user runs jobs as the server does, which is root there: that is an admin's to say."""
    client = lab.client(team="vision")
    users = lab.accounts._users
    users["ada"] = dataclasses.replace(users["ada"], unix_user="ada")  # set_user wants a server that is root
    status, message = ask(client, lab.issuer.token("mallory"))
    assert status == 401 and "pollux user add mallory --team vision --unix-user" in message
    assert lab.accounts.role_of("mallory") is None
    assert ask(client, lab.issuer.token("ada"))[0] == 200


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"audience": "a"}, "oidc.issuer = None"),
        ({"issuer": "http://login.example", "audience": "a"}, "an https URL is needed"),
        ({"issuer": "https://me:secret@login.example", "audience": "a"}, "an https URL is needed"),
        ({"issuer": "https://x.example"}, "oidc.audience = None"),
        ({"issuer": "https://x.example", "audience": "a", "algorithms": ["HS256"]}, "oidc.algorithms = 'HS256'"),
        ({"issuer": "https://x.example", "audience": "a", "algorithms": ["none"]}, "oidc.algorithms = 'none'"),
        ({"issuer": "https://x.example", "audience": "a", "algorithms": []}, "oidc.algorithms = []"),
        ({"issuer": "https://x.example", "audience": "a", "roles": {"x": "root"}}, "oidc.roles.x = 'root'"),
        ({"issuer": "https://x.example", "audience": "a", "roles": {"x": "admin"}}, "belong together"),
        ({"issuer": "https://x.example", "audience": "a", "team-claim": "groups"}, "belong together"),
        ({"issuer": "https://x.example", "audience": "a", "audiense": "b"}, "Did you mean 'audience'?"),
    ],
)
def test_a_table_that_would_let_in_too_many_is_refused(tmp_path, told, said):
    with pytest.raises(InputFileError) as refused:
        read_oidc(tmp_path / "pollux.toml", told)
    assert said in str(refused.value)


def test_a_table_is_read(tmp_path):
    told = {"issuer": "https://x.example", "audience": "a", "user-claim": "sub", "ca-file": "ca.pem", "timeout-s": 2}
    found = read_oidc(tmp_path / "pollux.toml", told)
    assert found is not None and (found.user_claim, found.algorithms) == ("sub", ("RS256", "ES256"))
    assert found.ca_file == tmp_path / "ca.pem" and read_oidc(tmp_path / "pollux.toml", None) is None
