"""What is said in the demo: all users share one handbook, and each asks something else."""

from dataclasses import dataclass
from importlib import resources
from typing import Final

Message = dict[str, str]
"""`role` and `content`, as chat models take them."""
INSTRUCTION: Final = (
    "You help the crew of a data hall. Answer from the handbook below, in one short sentence."
)
NAMES: Final = ("Ada", "Ben", "Chen", "Dara", "Edgar", "Fatima", "Gus", "Hana", "Ivo", "Jun")
QUESTIONS: Final = (
    "How many storage nodes does the fleet have?",
    "When do we replace a flash drive?",
    "Who is called when something is wrong?",
    "How long does the restart of a node take?",
    "What does the light of a drive tell me?",
    "What is the rule of one per row?",
    "Where do the grey boxes go?",
    "How do I close the transfer switch?",
    "What may a visitor see?",
    "What do I write in the blue book?",
    "How fast is a tenant's data deleted?",
    "What is done in the slow weeks?",
    "Why is the lever stiff?",
    "What does the bell mean when it rings twice?",
    "Who decides about more space for a tenant?",
    "Where does the cat sleep?",
    "How long do the batteries last?",
    "What happens on the first Tuesday of the month?",
    "When are three numbers an incident?",
    "What do we do with damp pallets?",
)


def handbook() -> str:
    return resources.files(__package__).joinpath("handbook.txt").read_text("utf-8")


def opening() -> list[Message]:
    """How every conversation begins."""
    return [{"role": "system", "content": f"{INSTRUCTION}\n\n{handbook()}"}]


@dataclass(frozen=True, slots=True)
class User:
    """No two users ask the same in the same turn."""

    number: int

    @property
    def name(self) -> str:
        again = self.number // len(NAMES)
        return NAMES[self.number % len(NAMES)] + (f" {again + 1}" if again else "")

    def question(self, turn: int) -> str:
        """What is asked in a turn; turns count from 1."""
        return QUESTIONS[(self.number + 3 * (turn - 1)) % len(QUESTIONS)]


class Conversation:
    """All that one user has said and heard, as it is sent with each question."""

    def __init__(self) -> None:
        self.messages = opening()

    def ask(self, question: str) -> list[Message]:
        self.messages.append({"role": "user", "content": question})
        return self.messages

    def hear(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
