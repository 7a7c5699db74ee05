"""What the demo model's voices say: everyday sentences, nursery rhymes and word lists.

Owns the vocabulary, the sentence grammar and the rule that keeps a tenth of all texts out of
training. Texts are lower case, without punctuation, numbers in words. Knows nothing of audio.
"""

from __future__ import annotations

import hashlib
import random
import re
from typing import Literal

Split = Literal["train", "test", "blind"]

NUMBERS = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()

SLOTS: dict[str, list[str]] = {
    "name": (
        "alice anna ben bob carl clara david emma frank george grace helen henry ivan jack james "
        "jane john julia karen laura linda lucy maria mark mary mike nina oliver paul peter rose "
        "sam sarah simon susan tom victor walter"
    ).split(),
    "place": (
        "park|station|library|market|school|office|hospital|museum|airport|beach|bank|garden|"
        "kitchen|hotel|theatre|church|bridge|harbour|factory|village|post office|bakery|"
        "train station|supermarket|town hall|swimming pool"
    ).split("|"),
    "city": (
        "london paris berlin rome madrid vienna dublin oslo boston chicago tokyo sydney moscow "
        "lisbon athens prague warsaw geneva cairo delhi"
    ).split(),
    "food": (
        "bread cheese rice soup pasta fish chicken salad pizza cake apples bananas oranges eggs "
        "potatoes tomatoes carrots onions butter honey chocolate beans mushrooms noodles pancakes "
        "sandwiches strawberries grapes"
    ).split(),
    "drink": "water coffee tea milk juice lemonade cocoa wine beer cider".split(),
    "animal": (
        "dog cat horse cow sheep goat pig duck hen fox wolf bear rabbit mouse lion tiger elephant "
        "monkey bird frog snake owl eagle whale penguin camel donkey squirrel"
    ).split(),
    "thing": (
        "book|letter|box|chair|table|lamp|clock|phone|camera|bottle|basket|ladder|key|map|ticket|"
        "umbrella|jacket|hat|mirror|blanket|bicycle|boat|car|guitar|piano|hammer|candle|parcel|"
        "picture|newspaper|computer|radio|suitcase|wallet|window|door"
    ).split("|"),
    "colour": "red blue green yellow white black brown grey orange purple pink golden".split(),
    "adj": (
        "big small old new heavy light clean dirty warm cold quiet loud strong weak broken empty "
        "full cheap expensive beautiful strange simple soft sharp round"
    ).split(),
    "person": (
        "teacher doctor farmer driver baker painter singer nurse sailor lawyer student gardener "
        "waiter writer pilot engineer neighbour uncle aunt mother father brother sister grandmother "
        "grandfather captain king queen"
    ).split(),
    "day": "monday tuesday wednesday thursday friday saturday sunday".split(),
    "month": ("january february march april may june july august september october november december").split(),
    "when": (
        "today|tomorrow|yesterday|tonight|this morning|this afternoon|this evening|next week|"
        "last night|every day|in the morning|after lunch|before dinner|at noon|at midnight|soon"
    ).split("|"),
    "weather": "sunny rainy cloudy windy snowy foggy stormy icy humid dry warm cold".split(),
    "past": (
        "found lost bought sold opened closed cleaned painted carried dropped forgot repaired "
        "borrowed wanted needed watched followed pushed pulled counted"
    ).split(),
    "verb": (
        "find buy sell open close clean paint carry bring take repair borrow watch move send check count hide keep show"
    ).split(),
    "go": "walked|drove|ran|went|travelled|cycled|hurried|returned|moved slowly|came back".split("|"),
    "adverb": "slowly quickly quietly carefully happily often never always usually sometimes".split(),
    "feel": "happy sad tired hungry thirsty angry afraid proud busy ready sick well lucky sleepy".split(),
    "hour": NUMBERS[:12],
    "minute": "five ten fifteen twenty thirty forty fifty".split(),
    "unit": "minutes hours days weeks months years miles metres pounds dollars euros pieces".split(),
    "room": "kitchen bedroom bathroom garage cellar attic hall garden study living room".split(),
    "sport": "football tennis chess cards golf hockey basketball cricket".split(),
    "job": (
        "wash the dishes|feed the cat|water the plants|call the bank|pay the bill|clean the room|"
        "lock the door|turn off the lights|write a letter|fix the roof|cook dinner|answer the phone|"
        "read the paper|make the bed|cut the grass|take out the rubbish"
    ).split("|"),
}

TEMPLATES = """
the {adj} {thing} is in the {room}
the {colour} {thing} belongs to {name}
{name} {past} a {adj} {thing} {when}
{name} {past} the {thing} at the {place}
the {person} {past} {number} {adj} {things}
{name} and {name} {go} to the {place}
my {person} {go} to {city} {when}
we {go} to the {place} on {day}
it will be {weather} in {city} {when}
it was {weather} and {weather} on {day}
the weather in {city} is {weather} {when}
i would like some {food} and {drink} please
can i have {number} cups of {drink} please
{name} likes {food} but not {food}
we had {food} with {food} for dinner
there are {number} {animals} in the {place}
the {animal} and the {animal} are {feel}
a {adj} {colour} {animal} sat near the {thing}
the {animal} ran {adverb} across the {place}
please {verb} the {thing} {when}
please {verb} the {adj} {thing} for {name}
please call {name} at {time}
the train to {city} leaves at {time}
the meeting with {name} is on {day} at {time}
wake me up at {time} on {day}
it is {time} in {city}
the {thing} costs {number} dollars
the {adj} {thing} costs {number} euros and {number} cents
{name} is {number} years old
the {place} is {number} miles from {city}
we waited {number} minutes for the {person}
the {person} is {adverb} {feel}
i am {feel} because the {thing} is {adj}
{name} was {feel} and {feel} {when}
do you know where the {thing} is
where did {name} put the {colour} {thing}
what time does the {place} open on {day}
who {past} the {thing} {when}
did you {verb} the {thing} {when}
why is the {animal} so {feel}
how many {animals} are there in the {place}
remember to {job} {when}
do not forget to {job} before {time}
{name} has to {job} on {day}
could you {job} please
they play {sport} in the {place} on {day}
{name} plays {sport} with the {person}
in {month} it is often {weather} in {city}
the {person} comes back in {month}
my birthday is in {month} on a {day}
turn left at the {place} and go past the {place}
the {thing} is under the {thing} next to the {adj} {thing}
the {person} gave {name} a {colour} {thing}
{name} will {verb} the {thing} and {verb} the {thing}
there is a {colour} {animal} on the {thing}
add {food} and {food} to the shopping list
set a timer for {number} {unit}
we need {number} {things} and {number} {things}
hello {name} this is {name} speaking
good morning {name} how are you {when}
thank you {name} the {thing} is {adj}
my name is {name} and i live in {city}
i have lived in {city} for {number} {unit}
""".strip().split("\n")

RHYMES = """
mary had a little lamb
its fleece was white as snow
and everywhere that mary went
the lamb was sure to go
twinkle twinkle little star
how i wonder what you are
up above the world so high
like a diamond in the sky
jack and jill went up the hill
to fetch a pail of water
jack fell down and broke his crown
and jill came tumbling after
humpty dumpty sat on a wall
humpty dumpty had a great fall
all the king's horses and all the king's men
could not put humpty together again
baa baa black sheep have you any wool
yes sir yes sir three bags full
hickory dickory dock
the mouse ran up the clock
row row row your boat
gently down the stream
merrily merrily merrily merrily
life is but a dream
london bridge is falling down
""".strip().split("\n")
RHYME_VERSES = [" ".join(RHYMES[start : start + 2]) for start in range(0, len(RHYMES) - 1, 2)] + [
    "mary had a little lamb its fleece was white as snow and everywhere that mary went the lamb was sure to go"
]

PHRASES = """
yes
no
maybe
hello
hello there
good morning
good evening
good night
thank you
thank you very much
see you later
see you tomorrow
how are you
stop
go on
please wait
one moment please
not now
of course
never mind
i do not know
excuse me
help me please
well done
what is that
who are you
come in
sit down
""".strip().split("\n")

COMMON_WORDS = (
    "able above act air almost alone answer arm army arrow ask autumn baby back bag ball band bath battle bay "
    "bed bee begin bell belt bird bit blood blow board body bone born bottom bowl boy brain branch "
    "brass brave break breath brick bright build burn bus bush business button call calm cap card care "
    "cart case catch cause cave chain chalk chance change cheek chest child choose circle class clay "
    "clear climb cloth cloud coal coat coin collar comb cook copper corn corner cotton cough country "
    "cover crack crowd crown cry cup cushion cut dance danger dark dawn deep desk dirt dish dog dream "
    "dress drum dust ear earth east edge eight end engine even event eye face fact fall family far farm fast "
    "fear feather field fight finger fire flag flame flat floor flower fly fold foot force forest fork "
    "form free friend front fruit game gate gift girl give glass glove gold grain grass great grip "
    "group grow guide hair hand hang happen harbour hard head hear heart heat help hill hole holiday "
    "hook hope horn hot hour house ice idea ink iron island jelly jewel join journey judge jump just "
    "keen kick kind kiss knee knife knot ladder lake land large last late laugh law lead leaf learn "
    "leather left leg lesson level lift line lip list long look love low lunch machine man many "
    "mass match meal measure meat meet memory metal middle mill mind minute mist money moon more "
    "mountain mouth music nail narrow nation neck need needle nerve nest net night noise north nose "
    "note number nut oak ocean oil open order outside oven owner page pain paper part party past path "
    "peace pen pencil pin pipe plan plane plant plate play plough pocket point poor porter pot powder "
    "power press price print prison pump purple quick rail rain range rat reason record regret "
    "rest reward rhythm rice right ring river road rod roll roof root rope rough rub rule run safe sail "
    "salt sand scale school science sea seat second secret seed self sense ship shirt shock shoe short "
    "shout side sign silk silver sister size skin skirt sky sleep slip slope smash smell smile smoke "
    "smooth sneeze snow soap sock song sort sound south space spade sponge spoon spring square stage "
    "stamp star start steam steel stem step stick stiff still stitch stocking stomach stone store "
    "storm story straight street stretch structure sudden sugar summer sun support surprise sweet swim "
    "system tail talk tall taste tax teaching test thick thin thought thread throat thumb thunder tide "
    "tight time tin toe tongue tooth top touch town trade train tray tree trick trouble trousers true "
    "turn twist umbrella value verse vessel view voice walk wall war wash waste watch wave wax way "
    "weather week weight west wet wheel whip whistle wide wild wind wine wing winter wire wise woman "
    "wood wool word work world worm wound wrong year yellow young zero"
).split()


def _vocabulary() -> list[str]:
    """Every word that any text can hold, sorted."""
    words = set(COMMON_WORDS) | set(NUMBERS) | set(TENS)
    for values in SLOTS.values():
        words.update(word for value in values for word in value.split())
    for line in [*RHYMES, *PHRASES, *(re.sub(r"\{\w+\}", " ", t) for t in TEMPLATES)]:
        words.update(line.split())
    return sorted(words)


VOCABULARY = _vocabulary()
# Sound-alikes cannot be told apart without a sentence around them, so word lists leave them out.
SOUND_ALIKES = frozenset(
    "a an the i to two for four by buy no know knot not see sea right write read red meat meet wood would weight wait "
    "hear here hour our one of sense cents peace pieces rose row it's its wine wear where plane plain poor o'clock had "
    "king's horn or and".split()
)
LIST_WORDS = [word for word in VOCABULARY if word not in SOUND_ALIKES]


def split_of(text: str) -> Split:
    """`train` for nine tenths of all texts; `test` and `blind` share the rest, by a hash of the text."""
    bucket = int.from_bytes(hashlib.sha1(text.encode()).digest()[:4], "big") % 20
    return "test" if bucket == 0 else "blind" if bucket == 1 else "train"


def _plural(noun: str) -> str:
    irregular = {"mouse": "mice", "wolf": "wolves", "sheep": "sheep", "box": "boxes", "fox": "foxes"}
    return irregular.get(noun, noun + ("es" if noun.endswith(("s", "sh", "ch", "x")) else "s"))


def spoken_number(rng: random.Random) -> str:
    """A number from one to ninety nine in words."""
    if rng.random() < 0.6:
        return rng.choice(NUMBERS)
    tens = rng.choice(TENS)
    return tens if rng.random() < 0.3 else f"{tens} {rng.choice(NUMBERS[:9])}"


def fill_slot(name: str, rng: random.Random) -> str:
    """A filler of a pattern's slot."""
    if name == "number":
        return spoken_number(rng)
    if name == "time":
        hour = rng.choice(SLOTS["hour"])
        return rng.choice([f"{hour} o'clock", f"half past {hour}", f"{hour} {rng.choice(SLOTS['minute'])}"])
    if name in ("animals", "things"):
        return _plural(rng.choice(SLOTS[name[:-1]]))
    return rng.choice(SLOTS[name])


def any_sentence(rng: random.Random) -> str:
    """One sentence of the grammar, whatever its split."""
    return re.sub(r"\{(\w+)\}", lambda m: fill_slot(m.group(1), rng), rng.choice(TEMPLATES))


def any_word_list(rng: random.Random, low: int = 2, high: int = 8) -> str:
    """Unrelated words: what a language model cannot guess and has to copy."""
    return " ".join(rng.choice(LIST_WORDS) for _ in range(rng.randint(low, high)))


def sentence(rng: random.Random, split: Split = "train") -> str:
    """A sentence of the given split."""
    while split_of(text := any_sentence(rng)) != split:
        pass
    return text


def word_list(rng: random.Random, split: Split = "train", low: int = 2, high: int = 8) -> str:
    """A word list of the given split."""
    while split_of(text := any_word_list(rng, low, high)) != split:
        pass
    return text


def training_utterance(rng: random.Random) -> str:
    """A text to speak in training: words, phrases, rhymes, word lists, one to three sentences."""
    kind = rng.random()
    if kind < 0.07:
        return rng.choice(LIST_WORDS) if rng.random() < 0.6 else rng.choice(PHRASES)
    if kind < 0.33:
        return word_list(rng)
    if kind < 0.38:
        return rng.choice(RHYMES if rng.random() < 0.6 else RHYME_VERSES)
    if kind < 0.82:
        return sentence(rng)
    return " ".join(sentence(rng) for _ in range(rng.choice((2, 2, 3))))
