"""The faults that `tools/mutations.py` puts into the source."""

import pytest
from mutations import ROOT, TABLE, files_of, read_table, source_of, sources_in


def test_every_mutation_has_its_place_and_its_tests_in_the_tree() -> None:
    """A change of the source may take its text away: give it another."""
    mutations, sources, wrong = read_table(TABLE.read_text()), sources_in(ROOT), []
    assert len({mutation.name for mutation in mutations}) == len(mutations)
    for mutation in mutations:
        try:
            source_of(mutation, sources)
            files_of(mutation, ROOT)
        except ValueError as error:
            wrong.append(f"{mutation.name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("row", ["name\n-a\n+b", "name: test_a.py\n+b", "name: test_a.py\n-a\n+b\nc"])
def test_a_row_that_is_no_fault_is_refused(row: str) -> None:
    with pytest.raises(ValueError, match="no fault"):
        read_table(row)
