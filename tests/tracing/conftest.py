"""The model of `traces_for_tests`, its text and its trace."""

from traces_for_tests import relu, texts, traced  # noqa: F401
