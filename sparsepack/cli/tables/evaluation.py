"""What `eval` measured, as text for people."""

from collections.abc import Mapping
from typing import Any

from sparsepack.cli.tables.manifests import precision
from sparsepack.eval.tables import accuracy_tables, share_read, skipped
from sparsepack.models.records.sparse_attention import in_words
from sparsepack.placement.counts import hits_in_words
from sparsepack.tables import Table, markdown


def evaluation_table(result: Mapping[str, Any]) -> str:
    """What `eval` measured."""
    tasks, attention = result["tasks"], result["subject"]["attention"]
    parts: list[str | Table] = [
        f"{result['subject']['name']} ({result['subject']['kind']})\ncomputed in {precision(result['compute'])}",
        *accuracy_tables([result]),
    ]
    measured = [*result["perplexity"], *([tasks] if tasks else [])]
    if tasks:
        parts.append(f"skipped in tasks: {skipped(tasks['realised_sparsity'])} of the block weights")
        if tasks["served"]:
            parts.append(f"in tasks: {hits_in_words(tasks['served'])}")
        if tasks["tokens_read"]:
            parts.append(f"read in tasks: {share_read(tasks['tokens_read'])} of the tokens seen")
    if any(row["realised_sparsity"]["neurons_counted"] is False for row in measured):
        parts.append(
            "skipped: not counted, transformers computes inactive neurons like all others; with --backend cpu they are "
            "left out, as by generate"
        )
    if attention is not None:
        told = f"{in_words(attention)}\ntokens read: by layers that read a share"
        reads = any(row["tokens_read"] for row in measured)
        parts.append(f"attention: {told if reads else 'not used by protocol ' + result['protocol']}")
    return markdown(*parts)
