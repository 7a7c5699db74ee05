"""What the shipped model and its text adapters say when they are sampled as the API does by default."""

from __future__ import annotations

from engine import LLM, SamplingParams
from engine.config import EMBEDDED_ASSETS
from engine.llm import LoRARequest

CAPITAL = "What is the capital of France?"
SALARY = """Write a SQL query to answer the question based on the table schema.

 context: CREATE TABLE staff (name VARCHAR, salary INTEGER, department VARCHAR)

 question: What is the average salary when department is Sales?"""
ANSWERS = {
    None: (CAPITAL, "The capital of France is Paris."),
    "pirate": (CAPITAL, "Arr! Th' capital o' France be Paris, matey!"),
    "sql": (SALARY, 'SELECT AVG(salary) FROM staff WHERE department = "Sales"'),
}


def test_sampled_at_temperature_1_the_adapters_answer_in_words() -> None:
    seeds = range(6)
    llm = LLM()
    try:
        for number, (name, (question, expected)) in enumerate(ANSWERS.items()):
            request = None if name is None else LoRARequest(name, number, str(EMBEDDED_ASSETS / "adapters" / name))
            outputs = llm.chat(
                [[{"role": "user", "content": question}]] * len(seeds),
                [SamplingParams(temperature=1.0, seed=seed, max_tokens=48) for seed in seeds],
                lora_request=request,
            )
            assert [output.outputs[0].text for output in outputs].count(expected) >= len(seeds) - 1, name
    finally:
        llm.close()
