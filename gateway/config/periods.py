"""Days and months in a time zone. Budgets and usage are counted in these periods."""

from datetime import date, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo


def zone_of(name: str) -> tzinfo | None:
    """Look up an IANA time zone. An empty name gives None, which means the machine's own. Raises `ValueError`."""
    if not name:
        return None
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, LookupError):
        raise ValueError(f"there is no time zone {name!r} here; write one as Europe/Berlin or UTC") from None


def day_of(now: float, zone: tzinfo | None) -> date:
    """Return the day of a Unix time."""
    return datetime.fromtimestamp(now, zone).date()


def begin_of(day: date, zone: tzinfo | None) -> float:
    """Return the Unix time when a day starts. The result is right even if clocks change on that day."""
    return datetime(day.year, day.month, day.day, tzinfo=zone).timestamp()


def next_day(day: date) -> date:
    return day + timedelta(days=1)


def next_month(day: date) -> date:
    """Return the first day of the following month."""
    return date(day.year + day.month // 12, day.month % 12 + 1, 1)
