"""The slots on the GPU of tokens whose keys and values lie in the host's memory."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenSlots:
    """The slots of a layer's tokens on the GPU: see `kernels/attention/token_slots.cu`.

    keys, values   -- of the type of the cache: [B, kv_heads, slots, head_dim]
    slot_of        -- int32 [B, kv_heads, context]
    token_of       -- int32 [B, kv_heads, slots]
    last_read      -- int32 [B, kv_heads, slots]
    listed, counts -- int32 [B, kv_heads, most that a step reads], [B, kv_heads]: slots that the last step read
    missed         -- int32 [B, kv_heads, most that a step reads, 2]
    missed_counts  -- int32 [B, kv_heads]: tokens that the last step fetched
    """

    keys: Tensor
    values: Tensor
    slot_of: Tensor
    token_of: Tensor
    last_read: Tensor
    listed: Tensor
    counts: Tensor
    missed: Tensor
    missed_counts: Tensor

    def forget(self, sequence: int, first: int, count: int) -> None:
        """Forget the slots of positions that are being written: what lies there is of another text."""
        self.slot_of[sequence, :, first : first + count] = -1

    def forget_next(self, positions: Tensor) -> None:
        """Forget the slot of one position in every sequence, int32 [B], which only the device reads."""
        here = positions.long()[:, None, None].expand(-1, self.slot_of.shape[1], 1)
        self.slot_of.scatter_(2, here, -1)
