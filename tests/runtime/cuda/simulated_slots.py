"""`kernels/attention/token_slots.cu` in plain Python: who gets a slot on the GPU."""

from sparsepack.runtime.cuda.attention.double_sparsity import TokenSlots


def assign_slots(slots: TokenSlots, row: tuple[int, int], tokens: list[int], position: int) -> list[int]:
    """`kernels/attention/token_slots.cu` for one key head. Returns the tokens that must be fetched."""
    slot_of, token_of, last_read = (x[row] for x in (slots.slot_of, slots.token_of, slots.last_read))
    has = [t for t in tokens if slot_of[t] >= 0 and token_of[slot_of[t]] == t]
    missing = [t for t in tokens if t not in has]
    for token in has:
        last_read[slot_of[token]] = position
    in_use = {int(slot_of[t]) for t in has}

    def age(slot: int) -> int:
        past = position - int(last_read[slot])
        return 255 if token_of[slot] < 0 or past < 0 else min(past, 255)

    free = [slot for slot in range(len(token_of)) if slot not in in_use]
    oldest = sorted(free, key=lambda slot: -age(slot))[: len(missing)]  # of one age the first
    chosen = sorted(oldest)
    for slot in chosen:
        if token_of[slot] >= 0 and slot_of[token_of[slot]] == slot:
            slot_of[token_of[slot]] = -1
    for token, slot in zip(missing, chosen, strict=True):
        slot_of[token], token_of[slot], last_read[slot] = slot, token, position
    fetched = [*missing, *([position] if position in has else [])]
    slots.counts[row], slots.missed_counts[row] = len(tokens), len(fetched)
    slots.listed[row][: len(tokens)] = slot_of[tokens]
    return fetched
