"""The workload of the A/B run: agents in conversations of many turns, each turn's prompt being all that was said before, and more.

Rule: a conversation is decided by its number and the seed alone, so that both arms serve the same requests token by token.
"""

from __future__ import annotations

import random
from array import array
from typing import Final

VOCABULARY: Final = 128_000
AGENTS: Final = 16  # system prompts, one of which begins each conversation
SYSTEM_TOKENS: Final = 2048
MOST_TURNS: Final = 12
INPUT_TOKENS: Final = (64, 768)  # what a user or a tool adds in a turn
OUTPUT_TOKENS: Final = (32, 160)  # what the model answers


class Turn:
    """One request: its prompt, and the answer that will be drawn token by token."""

    def __init__(self, conversation: Conversation, prompt: array[int], answer: array[int]) -> None:
        self.conversation = conversation
        self.prompt = prompt
        self.answer = answer


class Conversation:
    """One agent at work; its next turn begins when the last one was answered."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(seed * 1_000_003 + number)
        self._said = tokens(random.Random(seed * 31 + self._random.randrange(AGENTS)), SYSTEM_TOKENS)
        self.turns_left = self._random.randint(1, MOST_TURNS)

    def next_turn(self) -> Turn | None:
        """The next request, None at the conversation's end. The caller has had the answer to the one before."""
        if self.turns_left == 0:
            return None
        self.turns_left -= 1
        self._said.extend(tokens(self._random, self._random.randint(*INPUT_TOKENS)))
        prompt = self._said[:]
        answer = tokens(self._random, self._random.randint(*OUTPUT_TOKENS))
        self._said.extend(answer)
        return Turn(self, prompt, answer)


def tokens(source: random.Random, count: int) -> array[int]:
    """So many token ids."""
    drawn = array("I", source.randbytes(4 * count))
    return array("i", [token % VOCABULARY for token in drawn])


class Workload:
    """An endless line of conversations; a request that ends is followed by its conversation's next turn, or by a new one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._number = 0

    def follow(self, ended: Turn | None) -> Turn:
        """The request that follows one that has ended; with None, a new request."""
        turn = ended.conversation.next_turn() if ended is not None else None
        while turn is None:
            turn = Conversation(self._seed, self._number).next_turn()
            self._number += 1
        return turn
