"""What the demo model hears beyond everyday sentences: more sentence patterns, common words, strings that are no sentence.

Owns `words.txt`, the wide patterns and what share each kind of text has in training; adds to `text` and changes nothing
there, so that the everyday sentences stay what they are. Texts are lower case, without punctuation, numbers in words.
"""

from __future__ import annotations

import functools
import random
import re
from pathlib import Path

from . import text
from .text import SLOTS, Split, split_of

WORDS_FILE = Path(__file__).with_name("words.txt")

WIDE_SLOTS: dict[str, list[str]] = {
    "noun": (
        "agreement answer argument article budget building calendar century chapter choice comment committee company "
        "conference contract copy country culture customer decision department detail discovery discussion drawing "
        "education election evidence example exercise expert factor feature film generation government habit history "
        "idea industry invention knowledge lecture limit machine manager method mistake model movement network "
        "novel operation opinion orchestra package paragraph pattern performance period plan policy position practice "
        "problem process product programme project promise property purpose question reason report research result "
        "river routine rule schedule secretary service signal situation solution speech standard statement strategy "
        "structure subject success suggestion summary surface survey system target theory traffic training treasure "
        "university vehicle version victory vision visitor warning weapon website whisper winner wonder workshop"
    ).split(),
    "quality": (
        "accurate ancient annual average brilliant calm careful central certain clever comfortable common complete complex "
        "correct curious dangerous different difficult direct early effective efficient elegant enormous entire equal "
        "excellent famous final foreign formal fresh friendly general gentle genuine global helpful honest huge "
        "impossible independent interesting internal legal local lonely main massive minor modern mysterious narrow "
        "natural necessary nervous obvious official ordinary original particular patient perfect permanent personal "
        "pleasant polite popular possible powerful practical precise previous private proper public regular reliable "
        "remarkable responsible scientific secure separate serious silent similar special stable sudden suitable "
        "temporary terrible traditional typical unusual useful valuable various visible willing wonderful"
    ).split(),
    "did": (
        "accepted added adopted announced approved arranged avoided cancelled caused changed checked collected compared "
        "completed considered controlled created decided delivered described designed developed discovered discussed "
        "encouraged entered examined expected explained explored finished improved included introduced invented joined "
        "managed mentioned missed noticed observed obtained offered ordered organised planned prepared presented "
        "produced protected proved published received recommended recorded refused rejected remembered removed repeated "
        "replaced reported requested returned reviewed selected shared solved started studied suggested supported tested "
        "understood updated visited welcomed"
    ).split(),
    "do": (
        "accept add adopt announce approve arrange avoid cancel change check collect compare complete consider control "
        "create deliver describe design develop discuss encourage examine explain explore finish improve include "
        "introduce invent manage mention notice observe offer organise plan prepare present produce protect prove publish "
        "receive recommend record refuse reject remember remove repeat replace report request review select share solve "
        "start study suggest support test understand update visit welcome"
    ).split(),
    "people": (
        "artists athletes children citizens clients colleagues customers dancers designers directors editors experts "
        "farmers guests inventors judges leaders lawyers managers members musicians officers owners parents passengers "
        "patients players poets professors pupils readers reporters scientists soldiers speakers students teachers "
        "tourists users visitors volunteers workers"
    ).split(),
    "how": (
        "accidentally actually almost badly bravely calmly cheaply clearly closely completely constantly eagerly easily "
        "entirely exactly finally frequently generally gently gradually hardly honestly immediately nearly nervously "
        "normally obviously openly partly patiently perfectly politely possibly probably properly proudly publicly rarely "
        "recently regularly safely seriously silently simply slightly suddenly surely together usually"
    ).split(),
    "topic": (
        "art|biology|chemistry|economics|engineering|fashion|geography|grammar|health|justice|language|literature|"
        "mathematics|medicine|music|nature|painting|philosophy|physics|poetry|politics|psychology|religion|safety|science|"
        "technology|trade|travel|public transport|space travel|renewable energy|ancient history"
    ).split("|"),
    "nature": (
        "canyon cliff coast desert field forest glacier hill island jungle lake lagoon meadow mountain ocean peninsula "
        "plain pond ridge river shore stream summit swamp valley volcano waterfall"
    ).split(),
    "part": "ankle arm back chest ear elbow eye finger foot forehead hand heart knee leg neck shoulder stomach throat".split(),
    "tool": (
        "axe broom brush bucket chisel compass drill file fork glue hook ladder lever needle nail pencil pump rope ruler saw "
        "scissors screwdriver shovel spade spoon tape telescope thermometer torch wrench"
    ).split(),
    "country": (
        "argentina australia austria belgium brazil canada chile china colombia cuba denmark egypt england finland france "
        "germany ghana greece hungary iceland india indonesia ireland italy japan kenya mexico morocco nepal nigeria norway "
        "peru poland portugal romania russia scotland spain sweden switzerland turkey vietnam"
    ).split(),
    "ordinal": "first second third fourth fifth sixth seventh eighth ninth tenth last next".split(),
}  # fmt: skip

WIDE_TEMPLATES = """
the {noun} of the {noun} was {quality}
the {quality} {noun} {did} the {people}
{people} {how} {did} the {quality} {noun}
a {quality} {noun} is better than a {quality} {noun}
we {did} the {noun} because it was {quality}
the {people} will {do} the {noun} {when}
do you think that the {people} {did} the {noun}
it is {quality} to {do} the {noun} before {day}
nobody {did} the {ordinal} {noun} of the {noun}
the {ordinal} {noun} was about {topic} and {topic}
she {did} a {noun} about {topic} in {country}
he {how} {did} the {noun} with the {people}
{name} wrote a {quality} {noun} about {topic}
the {nature} in {country} is {quality} in {month}
we walked from the {nature} to the {nature} with {number} {people}
there is a {quality} {nature} between the {nature} and the {city} road
my {part} hurts when i carry the {tool}
he broke the {tool} and hurt his {part}
bring the {tool} and the {tool} to the {place} please
you need a {tool} a {tool} and some {quality} {noun}
in {country} the {people} {how} {do} their {noun}
the {people} of {country} {did} a {quality} {noun} {when}
why did the {noun} and the {noun} become so {quality}
if the {noun} is {quality} then {do} the {noun} again
after the {noun} the {people} {did} {number} {things}
without a {noun} the {noun} cannot be {quality}
can the {people} {do} a {quality} {noun} in {number} {unit}
this {noun} is {how} {quality} and that {noun} is {how} {quality}
the {colour} {noun} next to the {tool} looks {quality}
i would rather {do} {topic} than {do} {topic}
page {number} of the {noun} says that {topic} is {quality}
the price of the {quality} {tool} rose by {number} percent
according to the {noun} the {animals} near the {nature} are {quality}
let us {do} the {noun} and {do} the {noun} {when}
the {person} {how} asked for a {quality} {tool}
they {did} neither the {noun} nor the {noun}
""".strip().split("\n")

LINKS = "the a and of in to for with from by at on or but not is was it that this we he she they you".split()


@functools.cache
def wide_words() -> tuple[str, ...]:
    """The words of `words.txt`, in order."""
    lines = WORDS_FILE.read_text(encoding="ascii").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


@functools.cache
def string_words() -> tuple[str, ...]:
    """Everything that a string of words can hold: the common words, and the everyday ones without sound-alikes."""
    slots = {word for values in WIDE_SLOTS.values() for value in values for word in value.split()}
    return tuple(sorted({*wide_words(), *text.LIST_WORDS, *(slots - text.SOUND_ALIKES)}))


def any_wide_sentence(rng: random.Random) -> str:
    """One sentence of the wide patterns, whatever its split."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        return rng.choice(WIDE_SLOTS[name]) if name in WIDE_SLOTS else text.fill_slot(name, rng)

    return re.sub(r"\{(\w+)\}", fill, rng.choice(WIDE_TEMPLATES))


def any_word_string(rng: random.Random, low: int = 2, high: int = 8) -> str:
    """Words of the whole vocabulary that have nothing to do with each other, some with the small words of sentences between."""
    words = [rng.choice(string_words()) for _ in range(rng.randint(low, high))]
    if rng.random() < 0.4:
        words = [part for word in words for part in ((rng.choice(LINKS), word) if rng.random() < 0.5 else (word,))]
    return " ".join(words)


def wide_sentence(rng: random.Random, split: Split = "train") -> str:
    """A wide sentence of the given split."""
    while split_of(found := any_wide_sentence(rng)) != split:
        pass
    return found


def word_string(rng: random.Random, split: Split = "train", low: int = 2, high: int = 8) -> str:
    """A string of words of the given split."""
    while split_of(found := any_word_string(rng, low, high)) != split:
        pass
    return found


def training_utterance(rng: random.Random) -> str:
    """A text to speak in training: two fifths everyday, three tenths strings of words, the rest wide sentences and words."""
    kind = rng.random()
    if kind < 0.40:
        return text.training_utterance(rng)
    if kind < 0.70:
        return word_string(rng)
    if kind < 0.76:
        return rng.choice(string_words())
    if kind < 0.95:
        return wide_sentence(rng)
    return f"{wide_sentence(rng)} {text.sentence(rng) if rng.random() < 0.5 else word_string(rng)}"


def vocabulary() -> list[str]:
    """Every word that any text of training can hold, sorted."""
    fixed = {word for line in WIDE_TEMPLATES for word in re.sub(r"\{\w+\}", " ", line).split()}
    slots = {word for values in (*WIDE_SLOTS.values(), *SLOTS.values()) for value in values for word in value.split()}
    return sorted({*fixed, *slots, *LINKS, *string_words(), *text.VOCABULARY})
