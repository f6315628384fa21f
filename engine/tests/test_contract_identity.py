import dataclasses

import pytest

from coda_engine.contract.errors import IdentityError
from coda_engine.contract.identity import Identity, Isolation, cache_salt, pack, unpack, untrusted_salt
from coda_engine.contract.snapshot import session_key

SECRET = b"the cluster's secret"
IDENTITY = Identity("acme", "session/1 é", parent="root", router_id="r1", attempt=1, tier=2, ready_age_ms=12.5)


def test_an_identity_comes_back_as_it_was_packed():
    assert unpack(pack(IDENTITY, SECRET), SECRET) == IDENTITY


def test_the_packed_value_is_a_legal_header_value():
    value = pack(dataclasses.replace(IDENTITY, session="line\r\nbreak: \N{SNOWMAN}"), SECRET)
    assert value.isascii()
    assert value.isprintable()
    assert " " not in value


def test_a_value_signed_with_another_secret_is_refused():
    with pytest.raises(IdentityError, match="not signed with this cluster's secret"):
        unpack(pack(IDENTITY, b"another"), SECRET)


@pytest.mark.parametrize("position", range(0, 120, 7))
def test_a_value_with_one_changed_character_is_refused(position):
    value = pack(IDENTITY, SECRET)
    position %= len(value)
    changed = value[:position] + ("A" if value[position] != "A" else "B") + value[position + 1 :]
    with pytest.raises(IdentityError):
        unpack(changed, SECRET)


@pytest.mark.parametrize(
    "value", ["", "plain-session", "coda1..", "coda1.é.x", "coda2.a.b", "a.b.c.d", "coda1." + "A" * 9000]
)
def test_what_is_not_an_identity_value_is_refused(value):
    with pytest.raises(IdentityError):
        unpack(value, SECRET)


def test_tenants_have_salts_of_their_own_and_keep_them():
    first = cache_salt(Identity("a", "s"), SECRET, Isolation.TENANT)
    assert first == cache_salt(Identity("a", "other session"), SECRET, Isolation.TENANT)
    assert first != cache_salt(Identity("b", "s"), SECRET, Isolation.TENANT)
    assert first != cache_salt(Identity("a", "s"), b"another", Isolation.TENANT)


def test_shared_isolation_has_no_salt():
    assert cache_salt(IDENTITY, SECRET, Isolation.SHARED) is None


def test_an_untrusted_client_never_gets_a_tenants_salt():
    assert untrusted_salt("acme", SECRET) != cache_salt(Identity("acme", "s"), SECRET, Isolation.TENANT)
    assert untrusted_salt("a", SECRET) != untrusted_salt("b", SECRET)


def test_names_that_are_no_unicode_are_told_apart_like_any_other():
    """JSON may hold half a surrogate pair; an error on it would end the identity feature for everybody."""
    half, other_half = "\ud800", "\udc00"
    assert untrusted_salt(half, SECRET) != untrusted_salt(other_half, SECRET)
    assert session_key("", half) != session_key("", other_half)
    tenants = (cache_salt(Identity(tenant, "s"), SECRET, Isolation.TENANT) for tenant in (half, other_half))
    assert len(set(tenants)) == 2
    with pytest.raises(IdentityError):
        unpack(f"coda1.{half}.x", SECRET)
