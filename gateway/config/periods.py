"""Days and months of one time zone, as the periods of budgets and usage."""

from datetime import date, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo


def zone_of(name: str) -> tzinfo | None:
    """A time zone of the IANA database; None, the machine's own, for an empty name. Raises `ValueError`."""
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise ValueError(f"there is no time zone {name!r} here; write one as Europe/Berlin or UTC") from None


def day_of(now: float, zone: tzinfo | None) -> date:
    """The day of a time in seconds since 1970."""
    return datetime.fromtimestamp(now, zone).date()


def begin_of(day: date, zone: tzinfo | None) -> float:
    """Start of a day, in seconds since 1970; correct for days on which the clock changes."""
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()


def next_day(day: date) -> date:
    return day + timedelta(days=1)


def next_month(day: date) -> date:
    """The first day of the month after."""
    return date(day.year + day.month // 12, day.month % 12 + 1, 1)
