"""Token ids to text, a piece at a time."""

from collections.abc import Sequence

from tokenizers import Tokenizer

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns tokens into text as they come; the pieces together are the text of all tokens.

    tokenizer -- of the model; special tokens give no text
    prompt    -- ids before the first token: they give no text themselves, but decide whether a leading space belongs

    A token's text depends on its neighbours: bytes of one character may lie in several tokens, and decoders drop the
    space before the first word. So a piece is always the difference of two decodings that begin at the same token.
    `tokenizers.decoders.DecodeStream` is no substitute: it repeats an unfinished character of the prompt, raises where
    a word follows incomplete bytes, and cannot give the rest when no more tokens come.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)  # from the beginning of the last piece
        self._told = len(self._ids)  # of these, tokens whose text is out

    def push(self, id: int) -> str:
        """Add a token. Returns the text that is certain now: empty while the last character is incomplete."""
        self._ids.append(id)
        text = self._untold()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        del self._ids[: self._told]
        self._told = len(self._ids)
        return text

    def finish(self) -> str:
        """The rest, when no more tokens come; incomplete characters show as U+FFFD."""
        text = self._untold()
        self._told = len(self._ids)
        return text

    def _untold(self) -> str:
        return self._text(self._ids)[len(self._text(self._ids[: self._told])) :]

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))
