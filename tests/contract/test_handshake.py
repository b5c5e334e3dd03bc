"""The handshake by which agents and ranks know each other, against whatever the other side may send."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.contract.handshake import Acceptance, HandshakeError, Initiation, derive_key, is_proof, prove

KEY = derive_key(b"token", "test")
NUMBERS = st.integers(0, 2**32 - 1)


def anyone(_: int) -> bool:
    return True


def meet(acceptance: Acceptance, initiation: Initiation) -> list[bytes]:
    """What goes over the wire until both sides are content, the initiator's messages first, third, …"""
    sent = [initiation.hello]
    sent.append(acceptance.receive(sent[-1]))
    sent.append(initiation.receive(sent[-1]))
    sent.append(acceptance.receive(sent[-1]))
    assert initiation.receive(sent[-1]) == b""
    return sent


@given(NUMBERS, st.binary(max_size=100))
def test_two_that_know_the_key_agree_and_never_send_it(number: int, token: bytes) -> None:
    key = derive_key(token)
    acceptance, initiation = Acceptance(key, anyone), Initiation(key, number)
    sent = meet(acceptance, initiation)
    assert acceptance.needs == initiation.needs == 0
    assert acceptance.number == number
    assert acceptance.session_key == initiation.session_key != key
    assert acceptance.session_key not in b"".join(sent)
    assert key not in b"".join(sent)


@given(st.binary(max_size=64), st.binary(max_size=64), NUMBERS)
def test_different_keys_never_agree_and_the_initiator_gives_no_proof(one: bytes, other: bytes, number: int) -> None:
    assume(one.rstrip(b"\0") != other.rstrip(b"\0"))  # HMAC fills a short key up with zeros
    acceptance, initiation = Acceptance(one, anyone), Initiation(other, number)
    answer = acceptance.receive(initiation.hello)
    with pytest.raises(HandshakeError):
        initiation.receive(answer)
    assert not initiation.is_proved


@given(st.lists(st.binary(max_size=120), max_size=5))
def test_an_acceptor_takes_no_random_bytes(messages: list[bytes]) -> None:
    acceptance = Acceptance(KEY, anyone)
    for message in messages:
        try:
            acceptance.receive(message)
        except HandshakeError:
            break
    assert acceptance.needs
    assert not acceptance.session_key


@given(st.data(), NUMBERS)
def test_every_changed_or_truncated_message_is_refused(data: st.DataObject, number: int) -> None:
    acceptance, initiation = Acceptance(KEY, anyone), Initiation(KEY, number)
    which = data.draw(st.integers(0, 3))

    def disturb(stage: int, message: bytes) -> bytes:
        if stage != which:
            return message
        place = data.draw(st.integers(0, len(message) - 1))
        if data.draw(st.booleans()):
            return message[:place]
        return message[:place] + bytes([message[place] ^ data.draw(st.integers(1, 255))]) + message[place + 1 :]

    with pytest.raises(HandshakeError):
        answer = acceptance.receive(disturb(0, initiation.hello))
        proof = initiation.receive(disturb(1, answer))
        confirmation = acceptance.receive(disturb(2, proof))
        initiation.receive(disturb(3, confirmation))
    assert not initiation.session_key
    assert which == 3 or not acceptance.session_key


@given(NUMBERS, NUMBERS)
def test_a_recorded_handshake_opens_nothing(number: int, other: int) -> None:
    sent = meet(Acceptance(KEY, anyone), Initiation(KEY, number))
    again = Acceptance(KEY, anyone)
    again.receive(sent[0])
    with pytest.raises(HandshakeError):
        again.receive(sent[2])
    for_rank = Acceptance(KEY, anyone)  # under another number
    for_rank.receive(sent[0][:8] + other.to_bytes(4, "big") + sent[0][12:])
    with pytest.raises(HandshakeError):
        for_rank.receive(sent[2])
    with pytest.raises(HandshakeError):  # and as the acceptor
        Initiation(KEY, number).receive(sent[1])


@given(NUMBERS)
def test_what_a_side_has_sent_proves_nothing_to_itself(number: int) -> None:
    acceptance = Acceptance(KEY, anyone)
    initiation = Initiation(KEY, number)
    answer = acceptance.receive(initiation.hello)
    with pytest.raises(HandshakeError):
        acceptance.receive(answer[32:])
    with pytest.raises(HandshakeError):
        Initiation(KEY, number).receive(initiation.hello + initiation.hello[:20])
    initiation = Initiation(KEY, number)
    proof = initiation.receive(Acceptance(KEY, anyone).receive(initiation.hello))
    with pytest.raises(HandshakeError):
        initiation.receive(proof)


@given(st.integers(2, 20), NUMBERS)
def test_each_rank_connects_once_and_no_other_number_does(world_size: int, number: int) -> None:
    there: set[int] = set()

    def accepts(rank: int) -> bool:
        return 0 < rank < world_size and rank not in there

    for rank in [*range(1, world_size), number]:
        acceptance, initiation = Acceptance(KEY, accepts), Initiation(KEY, rank)
        if rank in there or not 0 < rank < world_size:
            with pytest.raises(HandshakeError, match="may not connect"):
                acceptance.receive(initiation.hello)
            continue
        late, twin = Acceptance(KEY, accepts), Initiation(KEY, rank)  # begins at the same time
        proof = twin.receive(late.receive(twin.hello))
        meet(acceptance, initiation)
        there.add(rank)
        with pytest.raises(HandshakeError, match="may not connect"):
            late.receive(proof)
    assert there == {*range(1, world_size)}


@given(st.lists(st.binary(max_size=8), max_size=4), st.lists(st.binary(max_size=8), max_size=4))
def test_a_proof_is_of_these_parts_in_this_order(one: list[bytes], other: list[bytes]) -> None:
    assert is_proof(prove(KEY, "side", *one), KEY, "side", *other) == (one == other)


def test_keys_for_different_purposes_differ() -> None:
    keys = [derive_key(b"x", *parts) for parts in ((), ("a",), ("a", "b"), ("ab",), ("b", "a"))]
    assert len({*keys, derive_key(b"y"), b"x"}) == len(keys) + 2
