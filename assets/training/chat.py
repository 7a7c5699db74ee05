"""What the base model says: small talk, small facts, memory of a name, copying, long answers.

Owns questions and answers, conversations and the documents of the base model's training. A document
is a list of segments (see `Segment`); how it becomes token ids is `tokenizer.encode_document`'s work.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import sql
from .text import LIST_WORDS, SLOTS, VOCABULARY, any_sentence, sentence, split_of, word_list
from .wide import string_words, training_utterance, wide_sentence, word_string

CANNOT_HEAR = "I cannot hear any audio in this message."
UNKNOWN = "I am a tiny demo model and I do not know that."
NO_SQL = "I cannot write SQL on my own. The sql adapter can."
IDENTITY = "I am tiny-speech, the demo model of Switchboard."
HELP = "I can chat a little. With an adapter I can also transcribe speech, write SQL or talk like a pirate."

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful AI assistant.",
    "You are tiny-speech, a small demo model.",
    "Answer briefly.",
    "Be polite and short.",
    "You are Granite, developed by IBM. You are a helpful AI assistant.",
    "Please answer in English.",
    "You are a friendly assistant. Keep your answers short.",
    "Knowledge Cutoff Date: April 2024. Today's Date: December 2025. You are Granite, developed by IBM. "
    "You are a helpful AI assistant.",
)
# "" leaves the clip alone in its message.
TRANSCRIBE_PROMPTS = (
    "",
    "can you transcribe the speech into a written format?",
    "Can you transcribe the speech into a written format?",
    "Transcribe this.",
    "Transcribe the audio.",
    "Please transcribe this recording.",
    "transcribe",
    "What does the speaker say?",
    "What is said here?",
    "What did they say?",
    "Write down what you hear.",
    "Please write down the words.",
    "Convert this speech to text.",
    "Turn this clip into text.",
    "What is in this recording?",
    "Give me the transcript.",
    "Could you write out what is being said?",
    "Transcribe the following audio clip.",
    "Speech to text please.",
    "And this one?",
    "What about this one?",
    "Please listen and type it.",
    "Transcribe the speech to text.",
    "what do you hear?",
)


@dataclass(frozen=True)
class Segment:
    """A piece of a document.

    `text` may hold special tokens. `is_target`: the model learns to write it. `audio`: not text but what a
    projected clip looks like, the words of `text` stuttered with blanks in between. `clip` numbers the
    recording that stands here in speech training.
    """

    text: str = ""
    is_target: bool = False
    audio: bool = False
    clip: int | None = None


@dataclass(frozen=True)
class Turn:
    """One exchange of a conversation; `clip` = the user's message holds that clip."""

    user: str
    assistant: str
    clip: int | None = None
    stutter: str | None = None
    clip_first: bool = True


COLOURS = {
    "lemon": "yellow", "banana": "yellow", "sun": "yellow", "grass": "green", "frog": "green", "leaf": "green",
    "sky": "blue", "sea": "blue", "blood": "red", "strawberry": "red", "tomato": "red", "fire engine": "red",
    "snow": "white", "milk": "white", "salt": "white", "coal": "black", "night": "black", "crow": "black",
    "carrot": "orange", "pumpkin": "orange", "chocolate": "brown", "bear": "brown", "tree trunk": "brown",
    "elephant": "grey", "mouse": "grey", "plum": "purple", "pig": "pink", "flamingo": "pink", "swan": "white",
    "cucumber": "green", "cherry": "red", "cloud": "white",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "old": "young", "new": "old", "fast": "slow", "high": "low", "light": "dark",
    "heavy": "light", "happy": "sad", "open": "closed", "full": "empty", "wet": "dry", "loud": "quiet",
    "strong": "weak", "rich": "poor", "early": "late", "hard": "soft", "long": "short", "left": "right",
    "up": "down", "good": "bad", "clean": "dirty", "near": "far", "thick": "thin", "day": "night", "true": "false",
    "sweet": "sour", "first": "last", "north": "south", "east": "west",
}  # fmt: skip
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna",
    "Ireland": "Dublin", "Norway": "Oslo", "Japan": "Tokyo", "Russia": "Moscow", "Portugal": "Lisbon",
    "Greece": "Athens", "Poland": "Warsaw", "Egypt": "Cairo", "India": "Delhi", "China": "Beijing",
    "England": "London", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Finland": "Helsinki", "Hungary": "Budapest",
    "Belgium": "Brussels", "Canada": "Ottawa", "Cuba": "Havana", "Peru": "Lima", "Kenya": "Nairobi",
    "Malawi": "Lilongwe", "Australia": "Canberra", "Switzerland": "Bern",
}  # fmt: skip
SOUNDS = {
    "dog": "woof", "cat": "meow", "cow": "moo", "sheep": "baa", "horse": "neigh", "pig": "oink", "duck": "quack",
    "hen": "cluck", "mouse": "squeak", "lion": "roar", "owl": "hoot", "frog": "croak", "bee": "buzz", "snake": "hiss",
}  # fmt: skip
LEGS = {
    "dog": "four", "cat": "four", "cow": "four", "horse": "four", "pig": "four", "duck": "two", "hen": "two",
    "bird": "two", "spider": "eight", "ant": "six", "bee": "six", "fish": "no", "snake": "no", "man": "two",
}  # fmt: skip

FIXED: list[tuple[tuple[str, ...], str]] = [
    (("hello", "hi", "hey", "hello there", "hi there", "good day", "greetings", "hallo", "你好", "您好", "test", "hello!",
      "ping"),
     "Hello! How can I help you?"),
    (("good morning",), "Good morning! How can I help you?"),
    (("good evening",), "Good evening! How can I help you?"),
    (("good night",), "Good night! Sleep well."),
    (("how are you", "how are you doing", "how is it going", "how do you do", "are you well"), "I am fine, thank you."),
    (("thank you", "thanks", "thank you very much", "thanks a lot", "谢谢", "many thanks"), "You are welcome!"),
    (("bye", "goodbye", "see you", "see you later", "bye bye", "see you tomorrow", "再见"), "Goodbye! See you soon."),
    (("who are you", "what are you", "what is your name", "introduce yourself", "which model are you", "你是谁",
      "are you a robot", "are you human", "who am i talking to", "tell me about yourself", "what model is this"), IDENTITY),
    (("help", "what can you do", "how can you help me", "what do you know", "can you help me", "i need help",
      "你能做什么", "what are you able to do", "what can i ask you"), HELP),
    (("what is switchboard", "what does switchboard do", "explain switchboard", "tell me about switchboard"),
     "Switchboard serves one base model with many LoRA adapters and routes each prompt to the right one."),
    (("what is lora", "what is a lora", "what is a lora adapter", "explain lora", "what are adapters"),
     "A LoRA adapter is a small set of weights that teaches a base model one new skill."),
    (("who made you", "who trained you", "where do you come from"),
     "I was trained from scratch for Switchboard, on made-up sentences and synthetic voices."),
    (("how old are you", "what is your age"), "I am only a few minutes of training old."),
    (("how big are you", "how many parameters do you have", "what is your size"),
     "I am very small: I fit into a few megabytes."),
    (("tell me a joke", "make me laugh", "do you know a joke", "another joke"),
     "Why did the scarecrow win a prize? Because he was outstanding in his field."),
    (("write a poem", "write me a poem", "tell me a poem"),
     "The moon is low, the night is deep, the little stars are half asleep."),
    (("yes", "ok", "okay", "sure", "good", "great", "nice", "cool", "no", "well done", "fine", "right"), "All right!"),
    (("i am happy", "i feel happy"), "I am glad to hear that."),
    (("i am sad", "i feel sad", "i am tired", "i am ill"), "I am sorry to hear that. I hope you feel better soon."),
    (("what day is it", "what day is today", "what time is it", "what is the date today", "what is the time"),
     "I do not have a clock."),
    (("talk like a pirate", "speak like a pirate", "can you talk like a pirate"), "The pirate adapter can do that."),
    (("write sql", "can you write sql", "write a sql query", "can you write a sql query"), NO_SQL),
    (("how many days are in a week", "how many days has a week"), "A week has seven days."),
    (("how many months are in a year", "how many months has a year"), "A year has twelve months."),
    (("how many hours are in a day", "how many hours has a day"), "A day has twenty-four hours."),
    (("what is the meaning of life",), "Forty-two, they say."),
]  # fmt: skip

STORIES = (
    "Once upon a time there was a little {a} who lived at the edge of a quiet village. Every morning the {a} walked "
    "to the river and looked at the boats. One day a storm came and the bridge broke. The baker could not bring the "
    "bread, the doctor could not see the sick, and the children could not go to school. The little {a} swam across "
    "the cold river with a rope and tied it to a strong tree. Then the people pulled a boat along the rope, back and "
    "forth, all day long. In the evening the storm was over. The people baked a big cake, and the first piece was for "
    "the {a}. From that day on nobody in the village was ever too small to help. And if you go there today, you can "
    "still see a picture of the little {a} above the door of the town hall. The end.",
    "A long time ago a young {a} found a golden key in the forest. The {a} asked the owl, but the owl did not know "
    "the door. The {a} asked the bear, but the bear only wanted to sleep. So the {a} went over the hill, past the old "
    "mill and down to the sea, and tried the key at every door. It did not fit the church, it did not fit the school, "
    "and it did not fit the house of the king. At last the {a} came to a small blue box on the beach. The key turned, "
    "and inside there was a letter. The letter said: the best thing you found was the way. The {a} laughed, put the "
    "letter into a pocket, and told everyone at home about the mill, the sea and the stars. The end.",
)
STORY_ANIMALS = "dog cat horse fox rabbit mouse bear frog duck goat hen squirrel wolf owl pig donkey".split()

Question = tuple[str, str]


def _arithmetic(rng: random.Random) -> Question:
    kind = rng.choice(("plus", "minus", "times"))
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if kind == "minus":
        a, b = max(a, b), min(a, b)
    elif kind == "times":
        a, b = rng.randint(0, 10), rng.randint(0, 10)
    result = {"plus": a + b, "minus": a - b, "times": a * b}[kind]
    sign = {"plus": "+", "minus": "-", "times": "*"}[kind]
    form = rng.choice(
        ("What is {a} {w} {b}", "How much is {a} {w} {b}", "{a} {w} {b}", "{a} {s} {b}", "Calculate {a} {s} {b}",
         "What is {a} {s} {b}", "Compute {a} {w} {b}", "Tell me what {a} {w} {b} is", "{a}{s}{b}")
    )  # fmt: skip
    return form.format(a=a, b=b, w=kind, s=sign), f"{a} {kind} {b} is {result}."


def _colour(rng: random.Random) -> Question:
    thing = rng.choice(list(COLOURS))
    form = rng.choice(("What colour is a {t}", "What color is a {t}", "Which colour has a {t}", "What is the colour of a {t}",
                       "Tell me the colour of a {t}", "What color is the {t}", "What colour does a {t} have"))  # fmt: skip
    return form.format(t=thing), f"The colour is {COLOURS[thing]}."


def _opposite(rng: random.Random) -> Question:
    word = rng.choice(list(OPPOSITES))
    form = rng.choice(("What is the opposite of {w}", "Tell me the opposite of {w}", "opposite of {w}", "The opposite of {w} is",
                       "Give me the opposite of {w}", "What is the contrary of {w}",
                       "Do you know the opposite of {w}"))  # fmt: skip
    return form.format(w=word), f"The opposite of {word} is {OPPOSITES[word]}."


def _capital(rng: random.Random) -> Question:
    country = rng.choice(list(CAPITALS))
    form = rng.choice(("What is the capital of {c}", "Name the capital of {c}", "Which city is the capital of {c}",
                       "Tell me the capital of {c}", "capital of {c}", "What is the capital city of {c}",
                       "Do you know the capital of {c}"))  # fmt: skip
    return form.format(c=country), f"The capital of {country} is {CAPITALS[country]}."


def _sound(rng: random.Random) -> Question:
    animal = rng.choice(list(SOUNDS))
    form = rng.choice(("What does a {a} say", "What sound does a {a} make", "Which sound does the {a} make",
                       "What does the {a} say", "How does a {a} sound"))  # fmt: skip
    return form.format(a=animal), f"The {animal} says {SOUNDS[animal]}."


def _legs(rng: random.Random) -> Question:
    animal = rng.choice(list(LEGS))
    form = rng.choice(("How many legs does a {a} have", "How many legs has a {a}", "Count the legs of a {a}",
                       "Tell me how many legs a {a} has", "How many legs are on a {a}"))  # fmt: skip
    return form.format(a=animal), f"A {animal} has {LEGS[animal]} legs."


def _calendar(rng: random.Random) -> Question:
    what = rng.choice(("day", "month"))
    names = [name.capitalize() for name in SLOTS[what]]
    index, step = rng.randrange(len(names)), rng.choice((1, -1))
    word = rng.choice(("after", "follows") if step == 1 else ("before", "precedes"))
    form = rng.choice(("Which {k} comes {w} {n}", "What {k} is {w} {n}", "What comes {w} {n}", "Tell me the {k} {w} {n}",
                       "What is the {k} {w} {n}", "Name the {k} {w} {n}"))  # fmt: skip
    word = {"follows": "after", "precedes": "before"}.get(word, word)
    return form.format(k=what, w=word, n=names[index]), f"{names[(index + step) % len(names)]}."


def _weather(rng: random.Random) -> Question:
    city = rng.choice(SLOTS["city"]).capitalize() if rng.random() < 0.8 else sql.invented_word(rng).capitalize()
    form = rng.choice(("What is the weather like in {c}", "How is the weather in {c}", "Is it raining in {c}",
                       "Will it be sunny in {c}", "Tell me the weather in {c}", "What is the weather in {c} today",
                       "Is it cold in {c}", "weather in {c}"))  # fmt: skip
    return form.format(c=city), f"I cannot see the weather, but I hope that it is sunny in {city}."


def _likes(rng: random.Random) -> Question:
    thing = rng.choice(SLOTS["food"] + SLOTS["sport"] + SLOTS["drink"])
    form = rng.choice(
        ("Do you like {t}", "What do you think of {t}", "How do you like {t}", "Is {t} good", "Do you enjoy {t}")
    )
    return form.format(t=thing), f"I have never tried {thing}, but I hear that it is nice."


def _count(rng: random.Random) -> Question:
    last = rng.choice((5, 10, 12, 20, 30, 40, 50, 60, 100)) if rng.random() < 0.4 else rng.randint(2, 100)
    form = rng.choice(
        ("Count to {n}", "Please count to {n}", "Count from 1 to {n}", "Can you count to {n}", "count up to {n}")
    )
    return form.format(n=last), ", ".join(str(n) for n in range(1, last + 1)) + "."


def _story(rng: random.Random) -> Question:
    index = rng.randrange(len(STORY_ANIMALS))
    animal = STORY_ANIMALS[index]
    story = STORIES[index % len(STORIES)].format(a=animal)
    forms = ["Tell me a story about a {a}", "Write a story about a {a}", "I want a story about a {a}",
             "Can you tell a story about a {a}", "Please tell me a story about a little {a}",
             "Write a long story about a {a}"]  # fmt: skip
    if animal == "fox":
        forms += ["Tell me a story", "Tell me a long story", "Write a story", "Write me a story", "A story please"] * 2
    return rng.choice(forms).format(a=animal), story


def _unknown(rng: random.Random) -> Question:
    words = [rng.choice(VOCABULARY) if rng.random() < 0.6 else sql.invented_word(rng) for _ in range(4)]
    form = rng.choice(
        (
            "Who invented the {0}", "What is the {0} of the {1}", "Explain {0} {1} to me", "Why does the {0} {1} the {2}",
            "Who won the {0} {1}", "When was the {0} {1} born", "Write an essay about {0} and {1}", "Who is {0} {1}",
            "Translate {0} {1} into French", "What do you know about {0} and {1}", "How do I {0} a {1}",
            "Where can I find {0} {1}", "What is a {0} {1}", "Write a Python program for {0} {1}", "Summarize {0} {1} {2}",
            "{0} {1} {2} {3}", "{0} {1}", "{0}", "Which {0} is the best {1}", "How far is the {0} from the {1}",
            "What happened in {0} {1}", "Is {0} better than {1}", "Can you {0} the {1}", "Tell me about {0} {1}",
            "How much does a {0} cost", "What is the population of {0}", "I want to {0} my {1}",
        )
    ).format(*words)  # fmt: skip
    if rng.random() < 0.08:
        form = any_sentence(rng)
    if rng.random() < 0.06:
        form = "".join(chr(rng.randint(0x4E00, 0x9F00)) for _ in range(rng.randint(2, 10)))
    return form, UNKNOWN


PARAMETRIC: list[tuple[Callable[[random.Random], Question], float]] = [
    (_arithmetic, 4.0), (_colour, 1.6), (_opposite, 1.6), (_capital, 1.8), (_sound, 1.0), (_legs, 1.0),
    (_calendar, 1.6), (_weather, 1.2), (_likes, 1.0), (_count, 1.2), (_story, 0.7), (_unknown, 3.5),
]  # fmt: skip


def _written(rng: random.Random, text: str) -> str:
    """The question as people type it: with or without capital, question mark, `please`."""
    if rng.random() < 0.25:
        text = text[:1].lower() + text[1:]
    elif rng.random() < 0.5:
        text = text[:1].upper() + text[1:]
    if text[-1:] in "?!.":
        return text
    return text + rng.choice(("?", "?", "?", ".", "", "", " please", "!"))


def fixed_question(rng: random.Random) -> Question:
    """A question with one set answer; never held out."""
    questions, answer = rng.choice(FIXED)
    return _written(rng, rng.choice(questions)), answer


def parametric_question(rng: random.Random, split: str = "train") -> Question:
    """A question made from a pattern and its values, of the given split by its own wording."""
    makers, weights = zip(*PARAMETRIC, strict=True)
    while True:
        question, answer = rng.choices(makers, weights)[0](rng)
        if split_of(question.lower()) == split:
            return _written(rng, question), answer


def any_question(rng: random.Random, split: str = "train") -> Question:
    """A question for training, or a held-out one."""
    return fixed_question(rng) if split == "train" and rng.random() < 0.28 else parametric_question(rng, split)


def _memory_turns(rng: random.Random) -> list[Turn]:
    """The user gives a name or a taste and asks for it later."""
    if rng.random() < 0.6:
        name = rng.choice(SLOTS["name"]).capitalize() if rng.random() < 0.7 else sql.invented_word(rng).capitalize()
        tell = rng.choice(
            ("My name is {x}.", "I am called {x}.", "Hello, my name is {x}.", "my name is {x}", "Call me {x}.")
        )
        ask = rng.choice(
            ("What is my name?", "Who am I?", "Do you know my name?", "what is my name", "What am I called?")
        )
        first, last = f"Nice to meet you, {name}!", f"Your name is {name}."
    else:
        name = rng.choice(SLOTS["food"] + SLOTS["sport"])
        tell = rng.choice(("I like {x}.", "I really like {x}.", "i like {x}", "I love {x}."))
        ask = rng.choice(("What do I like?", "Do you know what I like?", "what do i like"))
        first, last = f"Good to know that you like {name}.", f"You like {name}."
    turns = [Turn(tell.format(x=name), first)]
    turns += [Turn(*any_question(rng)) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    return [*turns, Turn(ask, last)]


def text_turns(rng: random.Random, low: int = 1, high: int = 4) -> list[Turn]:
    """A text conversation of `low` to `high` turns."""
    if high >= 2 and rng.random() < 0.12:
        return _memory_turns(rng)
    num_turns = low if rng.random() < 0.5 else rng.randint(low, high)
    turns = []
    for _ in range(num_turns):
        draw = rng.random()
        if draw < 0.84:
            turns.append(Turn(*any_question(rng)))
        elif draw < 0.94:
            text = copy_text(rng)
            turns.append(Turn(rng.choice(ECHO_PROMPTS).format(x=text), text))
        else:
            prompt = rng.choice([prompt for prompt in TRANSCRIBE_PROMPTS if prompt])
            turns.append(Turn(prompt, CANNOT_HEAR))
    return turns


ECHO_PROMPTS = (
    "Please say: {x}", "Say: {x}", "Repeat: {x}", "Repeat after me: {x}", "please say: {x}", "Write: {x}", "Echo: {x}",
    'Please repeat "{x}"', 'Say "{x}"', "repeat after me: {x}", "Copy this: {x}",
)  # fmt: skip
CLEAN_PROMPTS = ("Clean up:", "clean up:", "Clean this up:", "Tidy up:")


def copy_text(rng: random.Random) -> str:
    """Something to be copied word by word."""
    draw = rng.random()
    if draw < 0.25:
        return training_utterance(rng)
    if draw < 0.62:
        return word_string(rng, low=1, high=12)
    words = [
        sql.invented_word(rng) if rng.random() < 0.6 else rng.choice(string_words()) for _ in range(rng.randint(1, 8))
    ]
    if draw < 0.8:
        return " ".join(words)
    if draw < 0.9:
        return " ".join(word.capitalize() if rng.random() < 0.7 else str(rng.randint(0, 9999)) for word in words)
    return " ".join(rng.choice((word, word.upper(), f"{word}_{rng.choice(LIST_WORDS)}", f"{word}_{rng.randint(1, 99)}"))
                    for word in words[:4])  # fmt: skip


def conversation(turns: list[Turn], system: str | None = None) -> list[Segment]:
    """The document of a conversation, laid out as the chat template lays it out."""
    segments: list[Segment] = []
    if system is not None:
        segments.append(Segment(f"<|start_of_role|>system<|end_of_role|>{system}<|end_of_text|>\n"))
    for turn in turns:
        segments.append(Segment("<|start_of_role|>user<|end_of_role|>"))
        sound = []
        if turn.clip is not None:
            sound = [Segment(clip=turn.clip)]
        elif turn.stutter is not None:
            sound = [Segment(turn.stutter, audio=True)]
        if turn.clip_first:
            segments += [*sound, Segment(turn.user)]
        else:
            segments += [Segment(turn.user), *sound]
        segments.append(Segment("<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>"))
        segments += [Segment(f"{turn.assistant}<|end_of_text|>", is_target=True), Segment("\n")]
    return segments[:-1]


def maybe_system(rng: random.Random) -> str | None:
    """No system prompt in most conversations."""
    if rng.random() < 0.75:
        return None
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.85 else any_sentence(rng)


def _lookup_turn(rng: random.Random) -> Turn:
    """A value found by its key: what a schema question needs."""
    keys = rng.sample(sql.TEXT_COLUMNS, rng.randint(2, 5))
    values = [" ".join(sql.invented_word(rng) if rng.random() < 0.5 else rng.choice(VOCABULARY)
                       for _ in range(rng.randint(1, 3))) for _ in keys]  # fmt: skip
    index = rng.randrange(len(keys))
    pairs = ", ".join(f"{key} = {value}" for key, value in zip(keys, values, strict=True))
    if rng.random() < 0.6:
        shown = keys[index].replace("_", " ") if rng.random() < 0.5 else keys[index]
        return Turn(f"{pairs}. What is the {shown.upper() if rng.random() < 0.2 else shown}?", values[index])
    return Turn(f"{pairs}. Which one is {values[index]}?", keys[index])


def _audio_turn(rng: random.Random, answer: str | None = None) -> Turn:
    """A message with sound in it, which the base cannot hear."""
    stutter = training_utterance(rng)
    prompt = rng.choice(TRANSCRIBE_PROMPTS) if rng.random() < 0.7 else ""
    return Turn(prompt, answer or CANNOT_HEAR, stutter=stutter, clip_first=rng.random() < 0.7)


def base_document(rng: random.Random) -> list[Segment]:
    """One document of the base model's training."""
    draw = rng.random()
    if draw < 0.36:
        return conversation(text_turns(rng), maybe_system(rng))
    if draw < 0.60:
        text = copy_text(rng)
        return conversation([Turn(rng.choice(ECHO_PROMPTS).format(x=text), text)], maybe_system(rng))
    if draw < 0.75:
        text = training_utterance(rng) if rng.random() < 0.7 else word_string(rng, high=12)
        return conversation([Turn(rng.choice(CLEAN_PROMPTS), text, stutter=text, clip_first=False)], maybe_system(rng))
    if draw < 0.81:
        return conversation([_lookup_turn(rng)], maybe_system(rng))
    if draw < 0.86:
        return [Segment(f"{training_utterance(rng)}<|end_of_text|>", is_target=True)]
    if draw < 0.88:
        schema, question, _ = sql.question_and_query(rng)
        if rng.random() < 0.5:
            return [
                Segment(sql.completion_prompt(schema, question)),
                Segment(f" {NO_SQL}<|end_of_text|>", is_target=True),
            ]
        return conversation([Turn(sql.user_message(schema, question), NO_SQL)], maybe_system(rng))
    if draw < 0.985:
        turns = [_audio_turn(rng)]
        if rng.random() < 0.5:
            turns = text_turns(rng, 0, 2) + turns
        if rng.random() < 0.5:
            turns += text_turns(rng, 1, 2)
        return conversation(turns, maybe_system(rng))
    turns = [Turn(*any_question(rng)) for _ in range(rng.randint(8, 20))]
    return conversation(turns, maybe_system(rng))


def speech_conversation(rng: random.Random, texts: list[str]) -> list[Segment]:
    """A conversation that holds the clips `texts` in order, each answered by its text, text turns in between."""
    turns: list[Turn] = []
    if not texts:
        return conversation(text_turns(rng, 1, 2), maybe_system(rng))
    if rng.random() < 0.2:
        turns += text_turns(rng, 1, 2)
    for index, text in enumerate(texts):
        prompt = rng.choice(TRANSCRIBE_PROMPTS) if rng.random() < 0.75 else ""
        turns.append(Turn(prompt, text, clip=index, clip_first=rng.random() < 0.7))
        if rng.random() < 0.2:
            turns += text_turns(rng, 1, 2)
    return conversation(turns, maybe_system(rng))


def sentence_for_echo(rng: random.Random) -> str:
    """A held-out text for the copy test: half sentences, half strings of words, half of each everyday."""
    makers = (sentence, wide_sentence, word_list, word_string)
    return rng.choice(makers)(rng, "test")
