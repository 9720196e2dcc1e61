"""Codes and sessions of the page, on a clock of the test's."""

from dataclasses import dataclass

from gateway.web.session import CODE_S, CODES_MAX, IDLE_S, SAVE_S, SESSIONS_MAX, TOKEN_START, SavedSession, Sessions


@dataclass(slots=True)
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def logged_in(sessions: Sessions) -> str:
    opened = sessions.redeem(sessions.make_code())
    assert opened is not None
    return opened[0]


def test_a_code_logs_in_once() -> None:
    sessions = Sessions()
    code = sessions.make_code()

    opened = sessions.redeem(code)

    assert opened is not None
    assert opened[0].startswith(TOKEN_START)
    assert sessions.redeem(code) is None


def test_a_code_ends_after_a_minute() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    in_time, late = sessions.make_code(), sessions.make_code()

    clock.now += CODE_S - 1
    assert sessions.redeem(in_time) is not None
    clock.now += 1
    assert sessions.redeem(late) is None


def test_a_ninth_code_ends_the_oldest() -> None:
    sessions = Sessions()
    codes = [sessions.make_code() for _ in range(CODES_MAX + 1)]

    assert sessions.redeem(codes[0]) is None
    assert all(sessions.redeem(code) for code in codes[1:])


def test_a_session_ends_after_two_weeks_without_use_and_not_before() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    token = logged_in(sessions)

    for _ in range(3):
        clock.now += IDLE_S - 1
        assert sessions.use(token) is not None
    session = sessions.use(token)
    clock.now += IDLE_S
    assert session is not None
    assert not sessions.is_alive(session)
    assert sessions.use(token) is None


def test_looking_whether_a_session_is_alive_is_no_use_of_it() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    opened = sessions.redeem(sessions.make_code())
    assert opened is not None

    clock.now += IDLE_S / 2
    assert sessions.is_alive(opened[1])
    clock.now += IDLE_S / 2
    assert not sessions.is_alive(opened[1])


def test_revoking_ends_every_session_and_every_code() -> None:
    sessions = Sessions()
    tokens, code = [logged_in(sessions) for _ in range(3)], sessions.make_code()
    kept = [sessions.use(token) for token in tokens]

    assert sessions.revoke() == 3
    assert [sessions.use(token) for token in tokens] == [None] * 3
    assert sessions.redeem(code) is None
    assert not any(session and sessions.is_alive(session) for session in kept)


def test_logging_out_ends_one_session() -> None:
    sessions = Sessions()
    one, other = logged_in(sessions), logged_in(sessions)
    session = sessions.use(one)
    assert session is not None

    sessions.end(session)

    assert sessions.use(one) is None
    assert sessions.use(other) is not None


def test_sessions_are_bounded_and_the_least_used_gives_way() -> None:
    sessions = Sessions()
    tokens = [logged_in(sessions) for _ in range(SESSIONS_MAX)]
    sessions.use(tokens[0])

    newest = logged_in(sessions)

    assert sessions.use(tokens[1]) is None
    assert sessions.use(tokens[0])
    assert sessions.use(newest)


def test_what_is_no_secret_of_ours_opens_nothing() -> None:
    sessions = Sessions()
    token = logged_in(sessions)

    for wrong in ("", TOKEN_START, token[:-1], token + "x", token.upper(), "é" * 100, "x" * 10_000):
        assert sessions.use(wrong) is None
        assert sessions.redeem(wrong) is None


def test_sessions_go_on_in_the_next_daemon_which_knows_only_hashes_of_tokens() -> None:
    clock = Clock()
    before = Sessions(clock=clock)
    token, ended, old = logged_in(before), logged_in(before), logged_in(before)
    session = before.use(ended)
    assert session is not None
    before.end(session)
    clock.now += IDLE_S - 1
    before.use(token)
    saved = before.save()
    clock.now += 1
    after = Sessions(saved, clock)

    assert [after.use(each) is not None for each in (token, ended, old)] == [True, False, False]
    assert not any(secret.encode() in each.digest for each in saved for secret in (token, ended))
    assert after.use(saved[0].digest.hex()) is None
    # A code is good for a minute, in its own daemon.
    assert after.redeem(before.make_code()) is None


def test_a_use_is_worth_a_save_once_an_hour() -> None:
    clock = Clock()
    sessions = Sessions(clock=clock)
    token = logged_in(sessions)
    sessions.save()
    clock.now += SAVE_S - 1
    sessions.use(token)
    assert not sessions.is_unsaved
    clock.now += 1
    sessions.use(token)
    assert sessions.is_unsaved
    sessions.save()
    assert not sessions.is_unsaved


def test_more_sessions_than_are_held_are_the_newest_ones() -> None:
    saved = [SavedSession(str(at), bytes([at]), 1000.0 + at) for at in range(SESSIONS_MAX + 1)]

    assert [each.id for each in Sessions(saved, Clock()).save()] == [str(at) for at in range(1, SESSIONS_MAX + 1)]
