"""Users, teams and tokens: what is kept, what is refused, and what a restart finds."""

from __future__ import annotations

import os
import sqlite3

import pytest

from pollux.api.access import Revocation, TeamChange, TokenRequest, UserChange, format_slots, parse_slots
from pollux.errors import AccessDeniedError, InvalidValueError, UnknownNameError
from pollux.server.live import accounts as accounts_module
from pollux.server.live.accounts import Accounts
from pollux.server.storage.store import SqlStore
from pollux.types import Node


class Lab:
    """Accounts on a database, with a clock that is moved by hand and 8 slots."""

    def __init__(self, folder) -> None:
        self.path, self.now = folder / "pollux.db", 1000.0
        self.open()

    def open(self) -> None:
        self.accounts = Accounts(SqlStore(self.path), lambda: self.now)
        self.accounts.nodes = lambda: [
            Node(name="a", num_slots=6, accelerator="a100"), Node(name="v", num_slots=2, accelerator="v100")
        ]  # fmt: skip

    def user(self, name="ada", **options) -> str:
        """Adds a user to team vision; its token."""
        if not self.accounts.teams():
            self.accounts.set_team("vision", TeamChange(), is_new=True)
        self.accounts.set_user(name, UserChange(**options), is_new=True)
        return self.accounts.issue(TokenRequest(user=name)).token


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def test_a_token_names_its_user_and_survives_a_restart(lab):
    token = lab.user(role="admin")
    for _ in range(2):
        person = lab.accounts.person_of(token)
        assert (person.user, person.role) == ("ada", "admin")
        lab.open()
    assert lab.accounts.person_of("plx_" + "x" * 43) is None


def test_the_database_holds_no_token(lab):
    token = lab.user()
    with sqlite3.connect(lab.path) as connection:
        dump = "\n".join(connection.iterdump())
    assert "ada" in dump and token not in dump and token.removeprefix("plx_") not in dump


def test_a_user_has_a_bounded_number_of_tokens(lab, monkeypatch):
    monkeypatch.setattr(accounts_module, "MAX_TOKENS", 2)
    lab.user()
    lab.accounts.issue(TokenRequest(user="ada", expires_s=60.0))
    with pytest.raises(InvalidValueError, match=r"2 tokens of user 'ada' .* at most 2 .* pollux user tokens ada"):
        lab.accounts.issue(TokenRequest(user="ada"))
    lab.user("bob")
    for _ in range(3):
        lab.accounts.issue(TokenRequest(user=None))  # links of the operator
    lab.now += 61.0  # one has expired
    lab.accounts.issue(TokenRequest(user="ada"))
    lab.accounts.revoke(Revocation(user="ada"))
    lab.accounts.issue(TokenRequest(user="ada"))


def test_a_revoked_token_is_refused_at_once_and_after_a_restart(lab):
    first, second = lab.user(), lab.accounts.issue(TokenRequest(user="ada")).token
    gone = lab.accounts.revoke(Revocation(id=lab.accounts.tokens("ada")[0].id))
    assert [token.user for token in gone] == ["ada"]
    lab.open()
    with pytest.raises(AccessDeniedError, match="revoked"):
        lab.accounts.person_of(first)
    assert lab.accounts.person_of(second).user == "ada"
    assert len(lab.accounts.revoke(Revocation(user="ada"))) == 1
    assert lab.accounts.user("ada").num_tokens == 0


def test_a_token_expires(lab):
    lab.user()
    token = lab.accounts.issue(TokenRequest(user="ada", expires_s=60.0)).token
    assert lab.accounts.person_of(token) is not None
    lab.now += 60.0
    with pytest.raises(AccessDeniedError, match="expired"):
        lab.accounts.person_of(token)


def test_a_token_is_good_for_no_more_than_its_user(lab):
    token = lab.user(role="admin")
    lab.accounts.set_user("ada", UserChange(role="viewer"), is_new=False)
    assert lab.accounts.person_of(token).role == "viewer"
    with pytest.raises(InvalidValueError, match="viewer is the most"):
        lab.accounts.issue(TokenRequest(user="ada", role="member"))


def test_a_link_without_a_user_may_only_look(lab):
    token = lab.accounts.issue(TokenRequest()).token
    assert lab.accounts.person_of(token).user is None
    assert lab.accounts.person_of(token).role == "viewer"
    with pytest.raises(InvalidValueError, match="role admin for a token of a link"):
        lab.accounts.issue(TokenRequest(role="admin"))


def test_a_user_in_no_team_is_refused(lab):
    with pytest.raises(InvalidValueError, match=r"in no team.*pollux team add"):
        lab.accounts.set_user("ada", UserChange(), is_new=True)
    for team in ("vision", "nlp"):
        lab.accounts.set_team(team, TeamChange(), is_new=True)
    with pytest.raises(InvalidValueError, match=r"in no team.*vision, nlp"):
        lab.accounts.set_user("ada", UserChange(), is_new=True)
    with pytest.raises(UnknownNameError, match="visoin"):
        lab.accounts.set_user("ada", UserChange(team="visoin"), is_new=True)
    assert lab.accounts.users() == []


def test_guarantees_beyond_the_cluster_are_refused_and_nothing_is_changed(lab):
    lab.accounts.set_team("vision", TeamChange(guarantee={"a100": 4}), is_new=True)
    with pytest.raises(InvalidValueError, match=r"guarantees of 7 slots of type a100 in all.*has 6"):
        lab.accounts.set_team("nlp", TeamChange(guarantee={"a100": 3}), is_new=True)
    with pytest.raises(InvalidValueError, match=r"guarantees of 9 slots in all \(vision 4, nlp 5\).*has 8"):
        lab.accounts.set_team("nlp", TeamChange(guarantee={"any": 5}), is_new=True)
    assert [team.name for team in lab.accounts.teams()] == ["vision"]
    lab.accounts.set_team("nlp", TeamChange(guarantee={"any": 4}), is_new=True)


def test_a_guarantee_above_the_limit_is_refused(lab):
    with pytest.raises(InvalidValueError, match="guarantee of 4 slots of type any above the limit of 2"):
        lab.accounts.set_team("vision", TeamChange(guarantee={"any": 4}, limit={"any": 2}), is_new=True)


def test_guarantees_of_users_stay_inside_their_team(lab):
    lab.accounts.set_team("vision", TeamChange(guarantee={"any": 4}), is_new=True)
    lab.user("ada", guarantee={"any": 3})
    with pytest.raises(InvalidValueError, match=r"5 slots.*team vision is guaranteed 4"):
        lab.user("bob", guarantee={"any": 2})
    with pytest.raises(InvalidValueError, match=r"3 slots.*team vision is guaranteed 2"):
        lab.accounts.set_team("vision", TeamChange(guarantee={"any": 2}), is_new=False)


def test_a_team_with_users_stays(lab):
    lab.user()
    with pytest.raises(InvalidValueError, match="has users: ada"):
        lab.accounts.remove_team("vision")
    lab.accounts.set_team("nlp", TeamChange(), is_new=True)
    lab.accounts.set_user("ada", UserChange(team="nlp"), is_new=False)
    lab.accounts.remove_team("vision")
    lab.open()
    assert [(team.name, team.users) for team in lab.accounts.teams()] == [("nlp", ("ada",))]


@pytest.mark.parametrize("name", ["operator", "", "a b", "../x", "x" * 41, "-x"])
def test_names_that_could_be_taken_for_something_else_are_refused(lab, name):
    with pytest.raises(InvalidValueError, match="A-Z a-z 0-9"):
        lab.accounts.set_team(name, TeamChange(), is_new=True)


def test_a_name_is_given_once(lab):
    lab.user()
    with pytest.raises(InvalidValueError, match="there is a user 'ada'"):
        lab.user()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run jobs as others")
def test_unix_users_are_known_and_never_root(lab):
    lab.user("ada", unix_user="nobody")
    assert lab.accounts.unix_user_of("ada") == "nobody" and lab.accounts.unix_user_of("bob") == ""
    for name, match in (("root", "is root"), ("no-such-user", "not known")):
        with pytest.raises(InvalidValueError, match=match):
            lab.user("bob", unix_user=name)


@pytest.mark.parametrize("text", ["8", "a100=8,v100=4", "none"])
def test_slots_are_read_as_they_are_shown(text):
    assert format_slots(parse_slots(text)) == text


@pytest.mark.parametrize("text", ["-1", "a100", "a100=x", "8,8", "=4", "99999999999", "1.5"])
def test_slots_that_are_none_are_refused(text):
    with pytest.raises(InvalidValueError, match="a100=8"):
        parse_slots(text)


def test_a_cluster_that_has_become_too_small_for_its_guarantees_says_so(lab, caplog):
    lab.user()
    lab.accounts.set_team("vision", TeamChange(guarantee={"any": 5}), is_new=False)
    lab.accounts.tell_unkept()
    assert lab.accounts.unkept == "" and not caplog.records
    lab.open()  # restored on a smaller machine
    lab.accounts.nodes = lambda: [Node(name="a", num_slots=4, accelerator="a100")]
    told = (
        "not all guarantees can be kept: guarantees of 5 slots in all (vision 5); the cluster has 4: lower one of them"
    )
    for _ in range(2):
        lab.accounts.tell_unkept()
        assert lab.accounts.unkept.startswith(told)
    assert [record.getMessage().startswith(told) for record in caplog.records] == [True]
    lab.accounts.nodes = list  # none has joined yet
    assert lab.accounts.unkept == ""
