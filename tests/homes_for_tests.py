"""A user without a home."""

import pwd

import pytest


def without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor an entry of the user's is there, and no folder for caches is named."""

    def no_entry(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
