"""What is asked of the engine: conversations of several turns over a few shared system prompts.

Rule: a workload follows from its seed. Tokens are the bytes of UTF-8 text; what the model answers becomes part of the history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SYSTEM_PROMPTS = (
    "You are the night librarian of a small harbour town. Answer briefly, name the shelf where a book stands, and never "
    "lend the atlas of lost islands to anyone who arrives by boat. If you do not know, say which colleague would. ",
    "You are an assistant in the kitchen of a research station in the polar night. Suggest meals from what is in the store, "
    "count portions for eleven people, and keep the last crate of oranges for the day the sun returns. Be cheerful. ",
    "You review pull requests. Point at the line, say what can go wrong there and how to show it with a test; praise what "
    "is simple. Do not rewrite code that works, and do not comment on matters of taste that the formatter decides. ",
)
OPENINGS = ("Good evening. ", "Hello again! ", "Quick question: ", "", "One more thing. ", "Sorry to bother you, ")
QUESTIONS = (
    "what would you recommend for tonight?",
    "is there anything new since yesterday that I should know about?",
    "how many are left, and who took the others?",
    "could you explain why the second one is better than the first?",
    "what happens if nobody comes to collect it before the end of the week?",
    "please say that again, but shorter.",
    "where did you put the list we made together last time?",
    "can it wait until tomorrow, or must we decide at once?",
    "who else has asked about this, and what did you tell them?",
    "what is the worst that could come of it?",
)


@dataclass(frozen=True)
class Conversation:
    """One user's conversation: what is said before each answer, the system prompt included in the first."""

    number: int
    messages: list[list[int]]  # tokens, one list a turn
    answer_lengths: list[int]  # tokens to generate, one a turn
    beam_widths: list[int]  # hypotheses that a beam search follows, one a turn; 1: no search


def make_workload(seed: int, num_conversations: int, num_turns: int, beam_width: int = 1) -> list[Conversation]:
    """Conversations that share the system prompts evenly; every third turn is answered with `beam_width` beams."""
    chooser = random.Random(seed)
    conversations = []
    for number in range(num_conversations):
        messages = []
        for turn in range(num_turns):
            system = SYSTEM_PROMPTS[number % len(SYSTEM_PROMPTS)] if turn == 0 else ""
            text = f"{system}\nUser {number}: {chooser.choice(OPENINGS)}{chooser.choice(QUESTIONS)}\nAnswer: "
            messages.append(list(text.encode()))
        lengths = [chooser.randint(16, 48) for _turn in range(num_turns)]
        widths = [beam_width if (number + turn) % 3 == 0 else 1 for turn in range(num_turns)]
        conversations.append(Conversation(number, messages, lengths, widths))
    return conversations
