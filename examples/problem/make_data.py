"""Writes problems.jsonl, the data of the page "Your own problem with a real model"."""

import json
import random

rng = random.Random(0)
problems: dict[str, dict[str, object]] = {}
while len(problems) < 100:
    bags, apples, eaten = (rng.randint(2, 9) for _ in range(3))
    question = (
        f"A box holds {bags} bags with {apples} apples each. {eaten} are eaten. How many are left?"
    )
    problems[question] = {"question": question, "answer": bags * apples - eaten}
with open("problems.jsonl", "w") as file:
    for problem in problems.values():
        file.write(json.dumps(problem) + "\n")
