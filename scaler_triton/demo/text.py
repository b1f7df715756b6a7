"""Real text to train on: the documentation that Python carries with it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CharText:
    """A text as character numbers.

    Args:
        codes: the text, int64, shape (characters,).
        vocabulary: the characters, sorted; a character's place is its number.
    """

    codes: Tensor
    vocabulary: str

    def batch(self, step: int, rank: int, batch_size: int, context: int) -> tuple[Tensor, Tensor]:
        """Return inputs and next-character targets of one micro-batch, the same ones whoever asks."""
        generator = torch.Generator().manual_seed(1_000_003 * step + rank)
        starts = torch.randint(len(self.codes) - context - 1, (batch_size, 1), generator=generator)
        snippets = self.codes[starts + torch.arange(context + 1)]  # [batch_size, context + 1]
        return snippets[:, :-1], snippets[:, 1:]


def python_topics() -> CharText:
    """Return the help topics of this Python (`help("LOOPING")` and the like), half a million characters."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    vocabulary = "".join(sorted(set(text)))
    number = {character: place for place, character in enumerate(vocabulary)}
    return CharText(torch.tensor([number[character] for character in text]), vocabulary)
