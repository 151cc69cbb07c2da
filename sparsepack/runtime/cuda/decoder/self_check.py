"""What a decoder computes on a GPU of a kind on which nobody has run these kernels, compared with itself before use.

A prompt multiplies weights that were decoded to float16, by cuBLAS; a step has kernels of its own for every product and
for attention, whose blocks wait for each other. Both compute the same logits, so a step that is wrong shows, in
milliseconds, and the kernels are those that the model needs anyway. Steps that skip are run with thresholds of zero,
which read every column by the code that lists them.
"""

import torch
from torch import Tensor

from sparsepack.errors import UserError
from sparsepack.runtime.cuda.decoder.decoder import CudaDecoder

KNOWN = {(9, 0)}
"""Compute capabilities on which the tests of the GPU have run."""
TOKENS = 12
LIMIT = 0.1
"""The largest relative error of logits, as the median over positions: rounding may choose other experts at some. With
right kernels it is below 0.03 in all families of the tests; where a product takes columns of others, above one."""


def check_unknown(decoder: CudaDecoder) -> str | None:
    """Compare steps with a prompt, unless GPUs of this kind are known.

    Returns a line on it. Raises `UserError` where they differ.
    """
    if decoder.capability in KNOWN:
        return None
    kind = "{}, compute capability {}.{}".format(decoder.description, *decoder.capability)
    error = check_decoder(decoder, kind)
    return (
        f"{kind}: these kernels have not been run on such a GPU before; steps agree with a prompt (error {error:.0e})"
    )


def check_decoder(decoder: CudaDecoder, kind: str) -> float:
    """Compare steps of all sequences, dense and skipping, with a prompt; the decoder is as new afterwards.

    Returns the largest error. Raises `UserError` where it is above `LIMIT`.
    """
    count, vocabulary = len(decoder.cache.lengths), decoder.vocabulary
    ids = (torch.arange(1, TOKENS + 1) * vocabulary // (TOKENS + 2))[: decoder.context]
    if len(ids) < 2:
        return 0.0
    expected = decoder.prefill(0, ids, every=True)[1:].float()
    limits = decoder.thresholds()
    kept = [limit.clone() for limit in limits]
    errors = {}
    try:
        for limit in limits:
            limit.zero_()
        for sparse in (False, True) if limits else (False,):
            decoder.reset()
            for sequence in range(count):
                decoder.prefill(sequence, ids[:1])
            found = torch.stack([decoder.step([id] * count, sparse) for id in ids[1:].tolist()])
            errors["skipping columns" if sparse else "dense"] = _error(found.float(), expected[:, None])
    finally:
        for limit, before in zip(limits, kept, strict=True):
            limit.copy_(before)
        decoder.reset()
    for name, error in errors.items():
        if not error <= LIMIT:  # also where it is no number
            raise UserError(
                f"{kind}: steps ({name}) and a prompt give logits that differ by {error:.2g} of their size, expected "
                f"at most {LIMIT}; sparsepack's kernels are wrong on this GPU, on whose kind they have not been run "
                "before: use --device cpu or --backend reference, and report this line"
            )
    return max(errors.values())


def _error(found: Tensor, expected: Tensor) -> float:
    """The relative error of logits [positions, sequences, vocabulary]: the worst sequence's median."""
    size = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    return float(((found - expected).norm(dim=-1) / size).median(0).values.max())
