from hypothesis import given
from hypothesis import strategies as st

from moe_coverage_plugin.sampling.repetition import LONGEST_PERIOD, SHORTEST_LOOP, fingerprint, looping_tokens

tokens = st.integers(0, 5)


@given(
    start=st.lists(st.integers(10, 10_000), max_size=50, unique=True),
    passage=st.lists(tokens, min_size=1, max_size=LONGEST_PERIOD),
    rounds=st.integers(3, 6),
    rest=st.integers(0, LONGEST_PERIOD),
)
def test_a_passage_that_repeats_to_the_end_is_a_loop(
    start: list[int], passage: list[int], rounds: int, rest: int
) -> None:
    loop = passage * rounds + passage[: rest % len(passage)]
    found = looping_tokens(start + loop)
    assert found == (len(loop) if len(loop) >= SHORTEST_LOOP else 0)


@given(ids=st.lists(tokens, max_size=60))
def test_what_is_counted_has_a_period(ids: list[int]) -> None:
    found = looping_tokens(ids)
    assert found == 0 or found >= SHORTEST_LOOP
    tail = ids[len(ids) - found :]
    assert not tail or any(
        all(tail[i] == tail[i + period] for i in range(found - period)) for period in range(1, found // 3 + 1)
    )


def test_two_rounds_and_other_endings_are_no_loop() -> None:
    passage = list(range(100))
    assert looping_tokens(passage * 2) == 0
    assert looping_tokens(passage * 5) == 500
    assert looping_tokens([*passage * 5, -1]) == 0
    assert looping_tokens([]) == 0


def test_fingerprint_ignores_case_and_white_space() -> None:
    assert fingerprint(" A  b\n\nc ") == fingerprint("a B C")
    assert fingerprint("a b") != fingerprint("ab")
