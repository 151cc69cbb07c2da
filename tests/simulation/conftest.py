"""The model of `traces_for_tests`, its text, and traces of that and of another text."""

from traces_for_tests import other_text, relu, texts, traced  # noqa: F401
