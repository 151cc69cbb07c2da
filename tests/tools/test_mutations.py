"""The faults that `tools/mutations.py` puts into the source."""

import pytest
from mutations import MUTATIONS, ROOT, Mutation, source_of


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.name)
def test_the_text_that_a_mutation_changes_and_its_tests_stand_in_the_tree(mutation: Mutation) -> None:
    assert source_of(mutation).is_file()
    assert all((ROOT / path).exists() for path in mutation.tests)
