"""`kernels/token_places.cu` in plain Python: who gets a place on the GPU."""

from sparsepack.runtime.cuda.double.offload import TokenPlaces


def give_places(places: TokenPlaces, row: tuple[int, int], tokens: list[int], position: int) -> list[int]:
    """`kernels/token_places.cu` for one key head. Returns the tokens that must be fetched."""
    place_of, token_of, last_read = (x[row] for x in (places.place_of, places.token_of, places.last_read))
    has = [t for t in tokens if place_of[t] >= 0 and token_of[place_of[t]] == t]
    missing = [t for t in tokens if t not in has]
    for token in has:
        last_read[place_of[token]] = position
    in_use = {int(place_of[t]) for t in has}

    def age(place: int) -> int:
        past = position - int(last_read[place])
        return 255 if token_of[place] < 0 or past < 0 else min(past, 255)

    free = [place for place in range(len(token_of)) if place not in in_use]
    oldest = sorted(free, key=lambda place: -age(place))[: len(missing)]  # of one age the first
    chosen = sorted(oldest)
    for place in chosen:
        if token_of[place] >= 0 and place_of[token_of[place]] == place:
            place_of[token_of[place]] = -1
    for token, place in zip(missing, chosen, strict=True):
        place_of[token], token_of[place], last_read[place] = place, token, position
    fetched = [*missing, *([position] if position in has else [])]
    places.counts[row], places.missed_counts[row] = len(tokens), len(fetched)
    places.listed[row][: len(tokens)] = place_of[tokens]
    return fetched
