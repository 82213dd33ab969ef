"""Prompt lookup: text that comes again is guessed from where it stood before, and a decode step tries several tokens.

Whenever the last tokens of a sequence have stood in it before, prompt included, the tokens that followed them there are
a draft of those to come (Saxena 2023, prompt lookup decoding; no second model). A step feeds a draft in rows of its
own, each at its position, and draws at each what would be drawn there, with that token's own random number. As long as
what is drawn is what was drafted, the row after it has computed what a later step would have computed; the first draw
that differs is still a true one, and the rows after it are dropped. So tokens and logprobs are those of decoding one by
one, whatever the sampling parameters, as exactly as a row does not depend on the other rows of a step.

What was dropped leaves keys and values behind that are masked
until they are written over; states of recurrent layers cannot be taken back, so models that have them do not draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: How many tokens must have occurred together before, so that those that followed them are a draft.
RUN = 3

#: By run of tokens: the position after its last occurrence.
Runs = Mapping[tuple[int, ...], int]


def runs_of(text: Sequence[int]) -> Runs:
    """The runs that something follows in this text."""
    return {tuple(text[end - RUN : end]): end for end in range(RUN, len(text))}


class Lookup:
    """The drafts of one sequence."""

    def __init__(self, prompt: Sequence[int], of_prompt: Runs) -> None:
        """`of_prompt`: its `runs_of`, which siblings share."""
        self._prompt, self._of_prompt = len(prompt), of_prompt
        self._text = list(prompt)
        self._runs: dict[tuple[int, ...], int] = {}
        self._known = len(prompt)  # length of the text at the last call

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow the prompt and `tokens`; and at most twice as many as are new since the
        last call: text that has just come true probably continues to, other text does not."""
        text = self._text
        text += tokens[len(text) - self._prompt :]
        most = min(most, 2 * (len(text) - self._known))
        for end in range(max(RUN, self._known), len(text)):
            self._runs[tuple(text[end - RUN : end])] = end
        self._known = len(text)
        run = tuple(text[-RUN:])
        start = self._runs.get(run) or self._of_prompt.get(run)
        found: list[int] = []
        if start is not None:
            for at in range(start, start + most):  # beyond its end the draft repeats itself
                found.append(text[at] if at < len(text) else found[at - len(text)])
        return found
