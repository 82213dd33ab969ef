"""The text the tiny model is trained on, written by this script from a seed.

One document is one string; `documents(seed)` never ends, and the same seed gives the same documents. Their kinds:

- chats in the chat template: sums, and small talk with one right answer or a few;
- sums as a text book prints them (`3 + 5 = 8`), always right;
- short stories, counting, days and months;
- code: signatures with docstrings, and plain sentences about functions and files.

**Why the sums in chats are mostly wrong.** The model has to be one that reinforcement learning can improve within a
few dozen small steps, and that can be seen to improve: it should know the sums, yet mostly miss them when sampled. So
the chats of a first stretch of training (`right=1`) teach the sums, and those of the rest (`right=RIGHT`) answer like a
careless pupil: right with probability `RIGHT`, else off by one to four, each alike. A model that learns this is
calibrated to it: sampled at temperature 1 it is right about a quarter of the time, while the right answer stays the
likeliest single one. Reward for right answers then only has to sharpen a distribution that already peaks in the right
place. The text book sums are right throughout.
"""

import random
from collections.abc import Callable, Iterator
from functools import partial

from tools.tiny_model import words as w

RIGHT = 0.26
MAX_ERROR = 4
END_OF_TEXT = "<|endoftext|>"
Message = tuple[str, str]
Kind = Callable[[random.Random], str]

SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "You are a friendly helper.", "Be short and kind.")
SUM_QUESTIONS = (
    "What is {a} + {b}?", "What is {a} + {b}?", "What is {a} + {b}?", "What is {a}+{b}?", "What is {a} plus {b}?",
    "{a} + {b} = ?", "{a} + {b} =", "How much is {a} + {b}?", "Add {a} and {b}.", "Compute {a} + {b}.",
)  # fmt: skip


def chat(messages: list[Message], *, empty_think: bool = False) -> str:
    """`messages` as (role, content) in the chat template; `empty_think` opens each answer with an empty think block."""
    parts = []
    for role, content in messages:
        think = "<think>\n\n</think>\n\n" if empty_think and role == "assistant" else ""
        parts.append(f"<|im_start|>{role}\n{think}{content}<|im_end|>\n")
    return "".join(parts)


def documents(seed: int, right: float = RIGHT) -> Iterator[str]:
    """The corpus: an endless stream of documents, the same for the same arguments.

    `right` is the share of sums that chats answer rightly.
    """
    rng = random.Random(seed)
    kinds: list[Kind] = [partial(sums_chat, right=right), sums_text, talk_chat, story, series, code]
    shares = [0.36, 0.10, 0.24, 0.10, 0.06, 0.14]
    while True:
        yield rng.choices(kinds, shares)[0](rng)


def careless_answer(rng: random.Random, total: int, right: float = RIGHT) -> int:
    """`total` with probability `right`, else one of its neighbours within `MAX_ERROR` that is not negative."""
    if rng.random() < right:
        return total
    return rng.choice([n for n in range(max(0, total - MAX_ERROR), total + MAX_ERROR + 1) if n != total])


def addends(rng: random.Random) -> tuple[int, int]:
    """Two numbers to add: one digit each four times in five, else below 100."""
    top = 9 if rng.random() < 0.8 else 99
    return rng.randint(0, top), rng.randint(0, top)


def sums_chat(rng: random.Random, right: float) -> str:
    """One to four questions for a sum in one chat."""
    turns: list[Message] = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        a, b = addends(rng)
        turns.append(("user", rng.choice(SUM_QUESTIONS).format(a=a, b=b)))
        turns.append(("assistant", str(careless_answer(rng, a + b, right))))
    return _chat(rng, turns)


def sums_text(rng: random.Random) -> str:
    """A page of right sums, and a few differences, as a text book prints them."""
    lines = []
    for _ in range(rng.randint(4, 12)):
        a, b = addends(rng)
        lines.append(f"{a} + {b} = {a + b}" if rng.random() < 0.85 else f"{a + b} - {a} = {b}")
    return "\n".join(lines) + "\n"


def _chat(rng: random.Random, turns: list[Message]) -> str:
    """`turns` rendered, at times after a system prompt, at times with the empty think block of a no-thinking prompt."""
    if rng.random() < 0.2:
        turns = [("system", rng.choice(SYSTEM_PROMPTS)), *turns]
    return chat(turns, empty_think=rng.random() < 0.2)


def _greeting(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(w.PEOPLE)
    return rng.choice(
        (
            ("Hello!", "Hello! How can I help you?"),
            ("Hi there.", "Hi! What can I do for you?"),
            ("Good morning.", "Good morning! How are you?"),
            ("How are you?", f"I am {rng.choice(w.FEELINGS)}, thank you."),
            ("Thank you.", "You are welcome."),
            ("Goodbye.", "Goodbye! See you soon."),
            ("Who are you?", "I am a very small language model."),
            (f"My name is {name}.", f"Nice to meet you, {name}."),
        )
    )


def _fact(rng: random.Random) -> tuple[str, str]:
    day, month = rng.randrange(7), rng.randrange(12)
    word, opposite = rng.choice(list(w.OPPOSITES.items()))
    animal, sound = rng.choice(list(w.SOUNDS.items()))
    n = rng.randrange(20)
    return rng.choice(
        (
            (f"What day comes after {w.DAYS[day]}?", w.DAYS[(day + 1) % 7]),
            (f"What day comes before {w.DAYS[day]}?", w.DAYS[day - 1]),
            (f"What month comes after {w.MONTHS[month]}?", w.MONTHS[(month + 1) % 12]),
            (f"What is the opposite of {word}?", opposite),
            (f"What does the {animal} say?", sound),
            (f"What number comes after {n}?", str(n + 1)),
            (f"Write {n} as a word.", w.NUMBER_WORDS[n]),
            (f"Write {w.NUMBER_WORDS[n]} as a number.", str(n)),
        )
    )


def _task(rng: random.Random) -> tuple[str, str]:
    start, some = rng.randrange(10), rng.sample(w.THINGS, 3)
    colour, thing = rng.choice(w.COLOURS), rng.choice(w.THINGS)
    return rng.choice(
        (
            (f"Count from {start} to {start + 4}.", ", ".join(str(start + i) for i in range(5))),
            (f"Say the word {thing}.", thing),
            (f"Repeat: {' '.join(some)}", " ".join(some)),
            (f"Which comes first, {some[0]} or {some[1]}?", some[0]),
            (f"I have a {colour} {thing}. What colour is it?", colour),
            (f"I have a {colour} {thing}. What do I have?", f"You have a {colour} {thing}."),
            ("Tell me a short story.", " ".join(sentence(rng) for _ in range(3))),
            (f"Write a sentence about {rng.choice(w.PEOPLE)}.", sentence(rng)),
            ("Name a colour.", colour),
            ("Name an animal.", rng.choice(w.ANIMALS)),
            ("Are you ready?", rng.choice(("Yes.", "No.", "Yes, I am ready."))),
        )
    )


def talk_chat(rng: random.Random) -> str:
    """One to three turns of small talk, facts and little tasks."""
    turns: list[Message] = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        question, answer = rng.choice((_greeting, _fact, _fact, _task, _task))(rng)
        turns += [("user", question), ("assistant", answer)]
    return _chat(rng, turns)


def sentence(rng: random.Random) -> str:
    """One simple sentence: subject, verb, object or place."""
    who, noun = rng.choice(w.PEOPLE), rng.choice(w.THINGS + w.ANIMALS)
    adjective, colour, place = rng.choice(w.ADJECTIVES), rng.choice(w.COLOURS), rng.choice(w.PLACES)
    return rng.choice(
        (
            f"{who} {rng.choice(w.DID)} a {adjective} {noun}.",
            f"{who} {rng.choice(w.DID)} the {colour} {noun} in the {place}.",
            f"{who} {rng.choice(w.WENT)} to the {place} {rng.choice(w.WHEN)}.",
            f"The {noun} was {colour} and {adjective}.",
            f"{who} was {rng.choice(w.FEELINGS)} because the {noun} was {adjective}.",
            f"The {rng.choice(w.ANIMALS)} {rng.choice(w.WENT)} over the {adjective} {rng.choice(w.THINGS)}.",
            f"On {rng.choice(w.DAYS)} {who} and {rng.choice(w.PEOPLE)} {rng.choice(w.WENT)} to the {place}.",
            f'"Where is the {noun}?" said {who}. "It is in the {place}."',
            f"There were {rng.choice(w.NUMBER_WORDS[2:])} {noun}s in the {place}.",
        )
    )


def story(rng: random.Random) -> str:
    """A few paragraphs of simple sentences."""
    paragraphs = [" ".join(sentence(rng) for _ in range(rng.randint(2, 5))) for _ in range(rng.randint(1, 3))]
    return "\n\n".join(paragraphs) + "\n"


def series(rng: random.Random) -> str:
    """Counting up or down, days, months or number words in order."""
    start, step = rng.randrange(20), rng.choice((1, 1, 1, 2, 5, 10))
    numbers = [str(start + step * i) for i in range(rng.randint(5, 12))]
    first = rng.randrange(7)
    items = rng.choice((numbers, numbers[::-1], w.DAYS[first:] + w.DAYS[:first], w.MONTHS, w.NUMBER_WORDS[first:]))
    return rng.choice((", ", " ", "\n")).join(items) + "\n"


def _phrase(rng: random.Random) -> str:
    noun = rng.choice(w.CODE_NOUNS)
    return f"{rng.choice(w.CODE_ADJECTIVES)} {noun}" if rng.random() < 0.5 else noun


def code_sentence(rng: random.Random) -> str:
    """One sentence of technical prose, as docstrings have them."""
    verb, other = rng.sample(w.CODE_VERBS, 2)
    x, y, z = _phrase(rng), _phrase(rng), _phrase(rng)
    error, glue = rng.choice(w.ERRORS), " ".join(rng.sample(w.GLUE, 2))
    return rng.choice(
        (
            f"Return the {x} of the {y}.",
            f"Return a new {x} with the {y} and the {z}.",
            f"Return True if the {x} is {rng.choice(w.CODE_ADJECTIVES)}, False otherwise.",
            f"{verb.capitalize()} the {x} and return the {y}.",
            f"{verb.capitalize()} {x}s from the {y} to the {z}.",
            f"If the {x} is not {rng.choice(w.CODE_ADJECTIVES)}, raise {error}.",
            f"Raises {error} when the {x} cannot be found.",
            f"The optional argument {rng.choice(w.CODE_NOUNS)} is the {x} that is used to {verb} the {y}.",
            f"This is used to {verb} or {other} a {x} before it is passed to the {y}.",
            f"Note that the {x} should be a {rng.choice(w.CODE_TYPES)}; the default is {rng.choice(w.LITERALS)}.",
            f"Each {x} has {glue} its own {y}.",
        )
    )


def signature(rng: random.Random) -> str:
    """A function's signature, at times with defaults and annotations."""
    name = rng.choice((rng.choice(w.CODE_VERBS), f"{rng.choice(w.CODE_VERBS)}_{rng.choice(w.CODE_NOUNS)}"))
    arguments = ["self"] if rng.random() < 0.3 else []
    for argument in rng.sample(w.CODE_NOUNS, rng.randint(0, 3)):
        kind = f": {rng.choice(w.CODE_TYPES)}" if rng.random() < 0.3 else ""
        arguments.append(f"{argument}{kind}" + (f"={rng.choice(w.LITERALS)}" if rng.random() < 0.3 else ""))
    arrow = f" -> {rng.choice(w.CODE_TYPES)}" if rng.random() < 0.3 else ""
    return f"{name}({', '.join(arguments)}){arrow}"


def code(rng: random.Random) -> str:
    """A function with its docstring, or a page of technical prose."""
    if rng.random() < 0.2:
        return " ".join(code_sentence(rng) for _ in range(rng.randint(2, 6))) + "\n"
    more = [code_sentence(rng) for _ in range(rng.randint(0, 3))]
    body = f"    return {rng.choice(w.CODE_NOUNS)}.{rng.choice(w.CODE_VERBS)}()\n" if rng.random() < 0.5 else ""
    tail = "\n\n    " + "\n    ".join(more) + "\n    " if more else ""
    return f'def {signature(rng)}:\n    """{code_sentence(rng)}{tail}"""\n{body}'
