"""The sql adapter's task: a question over a toy table schema in, one SELECT statement out.

Names and values are drawn wide (known words, invented words, numbers), so that the only way to
be right is to copy them from the prompt.
"""

from __future__ import annotations

import random

from .text import COMMON_WORDS, SLOTS, VOCABULARY

INSTRUCTION = "Write a SQL query to answer the question based on the table schema."
TEXT_COLUMNS = (
    "airport icao city country nationality elector name title artist album team opponent venue location director "
    "writer player position school club college party district candidate year_built home_team away_team game_site "
    "result score format genre language label driver constructor engine circuit county state river mountain region "
    "capital currency product brand model color owner address street status category department manager employee "
    "course teacher subject author publisher song singer composer station channel network episode platform "
    "manufacturer species habitat family rank class type event host winner runner_up surface tournament coach "
    "stadium partner incumbent first_elected date_of_birth release_date record notes"
).split()
NUMBER_COLUMNS = (
    "year points goals games attendance population height weight age price salary laps wins losses draws rank_no "
    "total score_diff area length capacity votes seats rooms floors grid round pick gold silver bronze"
).split()
SYLLABLES = (
    "ba be bo da de di do fa fe ga go ha he ka ki ko la le li lo ma me mi mo na ne ni no pa pe po ra re ri ro sa se "
    "si so ta te ti to va ve vi vo wa za an en in on ar er or al el is us ton ville berg dale ford wick chan lon pant"
).split()


def invented_word(rng: random.Random) -> str:
    """A word that is in no list, such as `lilongwe`."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4)))


def _value(rng: random.Random) -> str:
    words = []
    for _ in range(rng.choice((1, 1, 2, 2, 3))):
        words.append(invented_word(rng) if rng.random() < 0.5 else rng.choice(VOCABULARY))
    style = rng.random()
    if style < 0.45:
        words = [word.capitalize() for word in words]
    if style > 0.9:
        words.append(str(rng.randint(1, 2100)))
    return " ".join(words)


def _column(rng: random.Random, known: list[str]) -> str:
    draw = rng.random()
    if draw < 0.75:
        return rng.choice(known)
    if draw < 0.87:
        return rng.choice(COMMON_WORDS)
    return f"{rng.choice(COMMON_WORDS)}_{rng.choice(COMMON_WORDS)}" if draw < 0.95 else invented_word(rng)


def _table(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.65:
        return f"table_name_{rng.randint(1, 99)}"
    if draw < 0.75:
        return f"table_{rng.randint(1, 9)}_{rng.randint(1000, 99999999)}_{rng.randint(1, 9)}"
    return rng.choice((rng.choice(COMMON_WORDS), rng.choice(SLOTS["animal"]) + "s", invented_word(rng)))


def _spoken(rng: random.Random, column: str) -> str:
    """The column as a question names it: with blanks for underscores, now and then in capitals."""
    words = column.replace("_", " ")
    draw = rng.random()
    if draw < 0.12:
        return words.title()
    return words.upper() if draw < 0.2 else words


def question_and_query(rng: random.Random) -> tuple[str, str, str]:
    """(schema, question, query), for instance the `CREATE TABLE` text, a question and its `SELECT`."""
    table = _table(rng)
    text_columns: list[str] = []
    for _ in range(rng.choice((2, 2, 2, 3, 4))):
        column = _column(rng, TEXT_COLUMNS)
        while column in text_columns:
            column = _column(rng, TEXT_COLUMNS)
        text_columns.append(column)
    number_column = rng.choice(NUMBER_COLUMNS)
    has_number = rng.random() < 0.45
    fields = [(column, "VARCHAR") for column in text_columns]
    if has_number:
        fields.append((number_column, "INTEGER"))
    rng.shuffle(fields)
    schema = f"CREATE TABLE {table} ({', '.join(f'{name} {kind}' for name, kind in fields)})"

    wanted, where = rng.sample(text_columns, 2)
    a, b = _spoken(rng, wanted), _spoken(rng, where)
    value = _value(rng)
    ask = f"SELECT {wanted} FROM {table}"
    plain = f'{ask} WHERE {where} = "{value}"'
    kind = rng.random()
    if len(text_columns) == 2 and kind < 0.12:
        value = f"{value} {where.replace('_', ' ')}" if rng.random() < 0.7 else value
        form = rng.choice(("Name the {a} for {v}", "What is the {a} for {v}?", "Name the {a} of {v}", "{a} for {v}?"))
        return schema, form.format(a=a, v=value), f'{ask} WHERE {where} = "{value}"'
    if kind < 0.62:
        form = rng.choice(
            (
                "What is the {a} when {b} is {v}?",
                "What is the {a} when the {b} is {v}?",
                "When {v} was the {b} what is under {a}?",
                "When {v} is the {b} what is the {a}?",
                "What {a} has a {b} of {v}?",
                "Which {a} has {b} {v}?",
                "What is the {a} with {b} {v}?",
                "Name the {a} for {b} of {v}",
                "Name the {a} when {b} is {v}",
                "What was the {a} of the {b} {v}?",
                "Show the {a} where {b} is {v}",
                "Find the {a} of {b} {v}.",
                "Tell me the {a} for {b} {v}",
            )
        )
        return schema, form.format(a=a, b=b, v=value), plain
    if kind < 0.72:
        form = rng.choice(
            ("How many {a} have {b} {v}?", "Count the {a} with {b} of {v}", "How many {a} have a {b} of {v}?")
        )
        return schema, form.format(a=a, b=b, v=value), f'SELECT COUNT({wanted}) FROM {table} WHERE {where} = "{value}"'
    if kind < 0.78:
        form = rng.choice(("List all {a}", "Show every {a}.", "What are all the {a}?", "List the {a} of all rows"))
        return schema, form.format(a=a), ask
    if not has_number:
        other = next((column for column in text_columns if column not in (wanted, where)), None)
        if other is None:
            return schema, f"What is the {a} when {b} is {value}?", plain
        second = _value(rng)
        form = rng.choice(
            (
                "What is the {a} with {b} of {v} and {c} of {w}?",
                "Which {a} has a {b} of {v}, and a {c} of {w}?",
                "Name the {a} when {b} is {v} and {c} is {w}",
            )
        )
        question = form.format(a=a, b=b, v=value, c=_spoken(rng, other), w=second)
        return schema, question, f'{plain} AND {other} = "{second}"'
    n = _spoken(rng, number_column)
    if kind < 0.9:
        words, function = rng.choice((("highest", "MAX"), ("lowest", "MIN"), ("average", "AVG"), ("total", "SUM")))
        form = rng.choice(("What is the {f} {n} with {b} {v}?", "What is the {f} {n} when {b} is {v}?"))
        query = f'SELECT {function}({number_column}) FROM {table} WHERE {where} = "{value}"'
        return schema, form.format(f=words, n=n, b=b, v=value), query
    limit = rng.randint(1, 2100)
    words, sign = rng.choice((("larger than", ">"), ("more than", ">"), ("less than", "<"), ("smaller than", "<")))
    form = rng.choice(("Which {a} has a {n} {s} {l}?", "What is the {a} with {n} {s} {l}?"))
    return schema, form.format(a=a, n=n, s=words, l=limit), f"{ask} WHERE {number_column} {sign} {limit}"


def user_message(schema: str, question: str) -> str:
    """The prompt as a chat message."""
    return f"{INSTRUCTION}\n\n context: {schema}\n\n question: {question}"


def completion_prompt(schema: str, question: str) -> str:
    """The prompt as raw text for the completions route."""
    return f"[user] {user_message(schema, question)} [/user] [assistant]"
