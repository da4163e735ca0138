"""Two users who like short answers: they ask, reward each answer, and commit after eight.

`python examples/serve/users.py ADDRESS KEY [STEPS]`
"""

import sys
import time

from trinity.explorer.proxy.client import TrinityClient

QUESTIONS = ["Why is the sky blue?", "What is a horse?"]
RUNS = 4


def use(client: TrinityClient, steps: int) -> None:
    chat = client.get_openai_client().chat.completions
    model = client.get_openai_client().models.list().data[0].id
    for step in range(1, steps + 1):
        lengths = []
        for question in QUESTIONS:
            messages = [{"role": "user", "content": question}]
            for _ in range(RUNS):
                reply = chat.create(model=model, messages=messages, max_tokens=48)
                lengths.append(len(reply.choices[0].message.content))
                client.feedback(1 - lengths[-1] / 300, [reply.id], task_id=question)
        mean = sum(lengths) / len(lengths)
        print(f"step {step}: {client.commit()} answers of {mean:.0f} characters")
        while client.get_metrics()["model_version"] < step:
            time.sleep(0.5)
    print(client.get_metrics())


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    address, key, *rest = sys.argv[1:]
    client = TrinityClient(address, key)
    if not client.alive():
        sys.exit(f"{address} does not answer yet, or has another key. Try again once it is shown.")
    use(client, int(rest[0]) if rest else 2)
